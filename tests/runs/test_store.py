"""Activation stores: they hold what the model holds, read lazily and in any order, and survive any interruption."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp import Batch, HookedTransformer, Stream
from interp.core import results
from interp.data.sources import open_source
from interp.model.tap import Read, Tap
from interp.runs import folder, provenance, store as stores
from interp.runs.store import TABLES, ActivationStore, store_activations
from tests.configs import build
from tests.tolerances import assert_close

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [1, 4, 1, 4, 2, 1, 3, 5, 6, 2, 3], [30, 11], [5] * 9, [8]]
POST, Z, STREAM = "blocks.0.mlp.hook_post", "blocks.1.attn.hook_z", "blocks.1.hook_resid_post"
SITES = (POST, Z, STREAM)
ENTRIES = sum(map(len, ROWS))


def model(dtype: torch.dtype = torch.float64) -> HookedTransformer:
    return HookedTransformer(build("gpt2", dtype))


def batches(size: int = 2, rows: list[list[int]] = ROWS) -> Iterator[Batch]:
    """Padded batches of `size` rows, numbered as in `rows`."""
    yield from Batch.of(rows).numbered().split(size)


def write(
    folder: Path,
    given: Iterable[Batch] | None = None,
    sites: tuple[str, ...] = SITES,
    dtype: torch.dtype = torch.float32,
) -> ActivationStore:
    """A small store with shards of 8 entries."""
    return store_activations(
        model(), batches() if given is None else given, sites, folder, dtype=dtype, shard_entries=8
    )


def alone(row: list[int], site: str) -> Tensor:
    """What a site holds at every token of a row that the model sees alone."""
    tap = Tap([Read(site)])
    model().transformer(torch.tensor([row]), tap)
    return tap.values[tap.reads[0]][0]


def digests(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


PACKED = replace(Batch.packed(ROWS, 12), row=torch.arange(len(ROWS)))
LAYOUTS: dict[str, Callable[[], Iterable[Batch]]] = {
    "right": batches,
    "left": lambda: Batch.of(ROWS, side="left").numbered().split(3),
    "packed": lambda: [PACKED],
    "one by one": lambda: (
        replace(Batch.of([row]), row=torch.tensor([i])) for i, row in reversed(list(enumerate(ROWS)))
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_is_stored_once_with_what_the_model_holds_there(layout: str, tmp_path: Path) -> None:
    found = write(tmp_path, LAYOUTS[layout]())
    row, pos, token = (found.read(name).tolist() for name in TABLES)
    assert len(found) == ENTRIES and found.sites == SITES
    assert sorted(zip(row, pos, token, strict=True)) == [
        (r, p, t) for r, ids in enumerate(ROWS) for p, t in enumerate(ids)
    ]
    for site in SITES:
        expected = torch.stack([alone(ROWS[r], site)[p] for r, p in zip(row, pos, strict=True)])
        assert_close(found.read(site), expected.float(), torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_token_of_every_text(layout: str, tmp_path: Path) -> None:
    found = store_activations(model(), LAYOUTS[layout](), [STREAM], tmp_path, pos="last", shard_entries=4)
    places = dict(zip(found.read("row").tolist(), found.read("pos").tolist(), strict=True))
    assert places == {i: len(row) - 1 for i, row in enumerate(ROWS)} and len(found) == len(ROWS)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("skip", [True, False])
def test_only_the_bos_that_a_batch_says_it_has_is_left_out(skip: bool, layout: str, tmp_path: Path) -> None:
    given = PACKED if layout == "packed" else Batch.of(ROWS).numbered()
    for bos in (True, False):
        found = store_activations(
            model(), [replace(given, bos=bos)], [STREAM], tmp_path / str(bos), skip_bos=skip
        )
        positions = found.read("pos").tolist()
        left_out = len(ROWS) if bos and skip else 0
        assert len(found) == ENTRIES - left_out and positions.count(0) == len(ROWS) - left_out


def test_a_site_without_rows_of_its_own_is_stored_for_every_row(tmp_path: Path) -> None:
    found = write(tmp_path, sites=("hook_pos_embed",))
    table = model().transformer.state_dict()
    width = found.read("hook_pos_embed").shape[1]
    learned = next(w for w in table.values() if w.shape == (24, width))
    assert torch.equal(found.read("hook_pos_embed"), learned[found.read("pos")].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_values_are_rounded_to_the_dtype_once(dtype: torch.dtype, tmp_path: Path) -> None:
    exact = write(tmp_path / "exact")
    found = store_activations(
        model(torch.float32), batches(), SITES, tmp_path / "narrow", dtype=dtype, shard_entries=8
    )
    again = store_activations(model(torch.float32), batches(), SITES, tmp_path / "wide", dtype=torch.float32)
    for site in SITES:
        assert found.read(site).dtype == dtype
        assert torch.equal(found.read(site), again.read(site).to(dtype))
        assert exact.read(site).shape == found.read(site).shape


def test_batches_of_another_size_give_the_same_entries(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a", batches(1)), write(tmp_path / "b", batches(4))
    for name in TABLES:
        assert torch.equal(one.read(name), other.read(name))
    for site in SITES:
        assert_close(one.read(site), other.read(site))


def test_shards_are_written_while_the_batches_come(tmp_path: Path) -> None:
    written = []

    def watched() -> Iterator[Batch]:
        for batch in batches(1):
            written.append(len(list(tmp_path.glob("shard-*"))))
            yield batch

    write(tmp_path, watched())
    lengths = [len(row) for row in ROWS]
    assert written == [sum(lengths[:i]) // 8 for i in range(len(ROWS))]


# -- reading


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return write(tmp_path_factory.mktemp("store"))


def test_any_slice_is_that_of_the_whole(stored: ActivationStore) -> None:
    whole = stored.read(Z)
    for start in (None, 0, 1, 7, 8, 9, 30, -3, 99):
        for stop in (None, 0, 1, 8, 16, 17, 35, -1, 99):
            assert torch.equal(stored.read(Z, slice(start, stop)), whole[start:stop])


def test_shards_are_the_store_in_pieces(stored: ActivationStore) -> None:
    shards = [stored.shard(i) for i in range(len(stored.index.shards))]
    assert [len(s["row"]) for s in shards] == [8, 8, 8, 8, 4]
    for name in (*TABLES, *SITES):
        assert torch.equal(torch.cat([s[name] for s in shards]), stored.read(name))
    with pytest.raises(IndexError, match=r"shards are 0 to 4, got 5"):
        stored.shard(5)


def mixed_in_lists(store: ActivationStore, size: int, buffer: int, seed: int) -> Iterator[Tensor]:
    """Runs of neighbours in random order, joined and permuted as a whole whenever the buffer is full."""
    generator = torch.Generator().manual_seed(seed)
    runs = store.read(STREAM).split(size)
    held: list[Tensor] = []
    for i in torch.randperm(len(runs), generator=generator).tolist():
        held.extend(runs[i])
        if len(held) >= buffer:
            held = [held[j] for j in torch.randperm(len(held), generator=generator)]
            out = max(1, len(held) // 2 // size) * size
            yield from torch.stack(held[:out]).split(size)
            held = held[out:]
    if held:
        yield from torch.stack([held[j] for j in torch.randperm(len(held), generator=generator)]).split(size)


@pytest.mark.parametrize(("size", "buffer"), [(1, 1), (3, 3), (4, 9), (2, 100)])
def test_the_buffer_gives_what_mixing_whole_lists_gives(
    stored: ActivationStore, size: int, buffer: int
) -> None:
    slow = list(mixed_in_lists(stored, size, buffer, 5))
    found = list(stored.batches(STREAM, size, shuffle_seed=5, buffer=buffer))
    assert len(found) == len(slow) and all(map(torch.equal, found, slow))
    assert all(batch.untyped_storage().nbytes() == batch.nbytes for batch in found)


@settings(max_examples=30)
@given(size=st.integers(1, 40), more=st.integers(0, 40), seed=st.integers(0, 5))
def test_every_entry_comes_once_per_epoch_and_the_order_is_the_seeds(
    stored: ActivationStore, size: int, more: int, seed: int
) -> None:
    def drawn(seed: int | None) -> list[list[int]]:
        found = stored.batches(STREAM, size, shuffle_seed=seed, buffer=size + more, epochs=2)
        return [[place[tuple(entry)] for entry in batch.tolist()] for batch in found]

    place = {tuple(entry): i for i, entry in enumerate(stored.read(STREAM).tolist())}
    per_epoch = len(drawn(seed)) // 2
    for epoch in (drawn(seed)[:per_epoch], drawn(seed)[per_epoch:]):
        assert sorted(i for batch in epoch for i in batch) == list(range(ENTRIES))
        assert [len(batch) for batch in epoch[:-1]] == [size] * (per_epoch - 1)
    assert drawn(seed) == drawn(seed)
    assert [i for batch in drawn(None) for i in batch] == [*range(ENTRIES), *range(ENTRIES)]


def test_another_seed_or_epoch_is_another_order_and_a_batch_mixes_runs(stored: ActivationStore) -> None:
    one, other = ([b.tolist() for b in stored.batches(STREAM, 4, shuffle_seed=s, epochs=2)] for s in (0, 1))
    assert one != other and one[: len(one) // 2] != one[len(one) // 2 :]
    place = {tuple(entry): i for i, entry in enumerate(stored.read(STREAM).tolist())}
    assert all(len({place[tuple(entry)] // 4 for entry in batch}) > 1 for batch in one)


def test_batches_without_end(stored: ActivationStore) -> None:
    endless = stored.batches(STREAM, ENTRIES, epochs=None, shuffle_seed=0)
    assert [len(next(endless)) for _ in range(5)] == [ENTRIES] * 5


def test_what_cannot_be_read_is_refused(stored: ActivationStore) -> None:
    with pytest.raises(
        KeyError, match=r"'blocks.0.hook_resid_post' is not stored; nearest: blocks.1.hook_resid_post"
    ):
        stored.read("blocks.0.hook_resid_post")
    with pytest.raises(ValueError, match=r"consecutive entries are required, got a step of 2"):
        stored.read(Z, slice(0, 8, 2))
    for size, buffer, epochs in ((0, 8, 1), (9, 8, 1), (4, 8, 0)):
        with pytest.raises(ValueError, match=r"1 <= size <= buffer and epochs >= 1"):
            next(stored.batches(Z, size, buffer=buffer, epochs=epochs))
    with pytest.raises(
        ValueError, match=r"device must be one of this machine, float32 on xla is not possible here"
    ):
        next(stored.batches(Z, 4, device="xla"))


# -- interruption


class CrashError(Exception):
    """What stands for the end of the process."""


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("step", range(12))
def test_a_write_that_stops_at_any_moment_goes_on_to_the_same_bits(
    step: int, torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write of a file is a moment: the process ends before it, or in it, leaving a torn file behind."""
    write(tmp_path / "whole")
    calls = 0

    def crashing(path: Path, fill: Callable[[Path], object], **options: bool) -> None:
        nonlocal calls
        if calls == step:
            if torn:
                (path.parent / f".{path.name}.torn{path.suffix}").write_bytes(b"half")
            raise CrashError
        calls += 1
        results.write_atomically(path, fill, **options)

    with monkeypatch.context() as patched:
        patched.setattr(folder, "write_atomically", crashing)
        with pytest.raises(CrashError):
            write(tmp_path / "parts")
    assert calls == step
    if calls:
        with pytest.raises(ValueError, match=r"not finished, it holds .* call store_activations again"):
            ActivationStore.open(tmp_path / "parts")
    write(tmp_path / "parts")
    assert digests(tmp_path / "parts") == digests(tmp_path / "whole")


def test_what_is_stored_is_not_run_again(tmp_path: Path) -> None:
    def until(n: int) -> Iterator[Batch]:
        for i, batch in enumerate(batches(1)):
            if i == n:
                raise CrashError
            yield batch

    with pytest.raises(CrashError):
        write(tmp_path, until(4))
    ran: list[Tensor] = []
    network = model().transformer
    handle = network.register_forward_pre_hook(lambda _, args: ran.append(args[0]))
    try:
        write(tmp_path, batches(1))
        resumed = len(ran)
        write(tmp_path, batches(1))
    finally:
        handle.remove()
    lengths = [len(row) for row in ROWS]
    whole = sum(sum(lengths[: i + 1]) <= sum(lengths[:4]) // 8 * 8 for i in range(len(ROWS)))
    assert resumed == len(ROWS) - whole and len(ran) == resumed


def test_store_has_one_writer_at_a_time_and_killed_ones_block_nothing(tmp_path: Path) -> None:
    def also() -> Iterator[Batch]:
        for batch in batches():
            with pytest.raises(
                ValueError, match=r"another process writes the store of activations in .*: one"
            ):
                write(tmp_path / "store")
            yield batch

    whole = write(tmp_path / "whole")
    for name in (".index.json.1a2b3c4d.json", ".shard-00000.safetensors.1a2b3c4d.safetensors"):
        (tmp_path / "store").mkdir(exist_ok=True)
        (tmp_path / "store" / name).write_bytes(b"half")
    (tmp_path / "store" / ".shard-00000.safetensors.1a2b3c4d.safetensors").unlink()
    store = write(tmp_path / "store", also())
    (tmp_path / "store" / ".shard-00009.safetensors.1a2b3c4d.safetensors").write_bytes(b"half")
    assert write(tmp_path / "store").index == store.index == whole.index
    assert digests(tmp_path / "store") == digests(tmp_path / "whole")


def test_a_full_disk_is_said_with_what_to_do_and_the_store_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: dict[str, Tensor], name: str) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(stores, "_fill", full)
        with pytest.raises(OSError, match=r"No space left on device: make room .*shard-00000\.safetensors"):
            write(tmp_path / "store")
    write(tmp_path / "store")
    write(tmp_path / "whole")
    assert digests(tmp_path / "store") == digests(tmp_path / "whole")


def test_more_batches_than_are_stored_are_added(tmp_path: Path) -> None:
    write(tmp_path, batches(1, ROWS[:3]))
    longer = write(tmp_path, batches(1))
    whole = write(tmp_path.with_name("whole"), batches(1))
    for name in (*TABLES, *SITES):
        assert torch.equal(longer.read(name), whole.read(name))


def test_a_write_that_would_mix_stores_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(
        ValueError, match=r'another store of activations: dtype: was "float32", is "float16"; a'
    ):
        write(tmp_path, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"another store of activations: sites: was .*hook_z.*, is"):
        write(tmp_path, sites=(POST,))
    with pytest.raises(ValueError, match=r"model_sha256: was"):
        store_activations(
            HookedTransformer(build("mqa")), batches(), SITES, tmp_path, dtype=torch.float32, shard_entries=8
        )
    with pytest.raises(ValueError, match=r'data: was null, is "abc"'):
        store_activations(
            model(), batches(), SITES, tmp_path, dtype=torch.float32, shard_entries=8, source="abc"
        )


def test_going_on_with_other_batches_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    other = [list(row) for row in ROWS]
    other[2][5] = 29
    with pytest.raises(
        ValueError, match=r"entry 18 is \{'row': 2, 'pos': 5, 'token': 29\}, stored .*'token': 1\}"
    ):
        write(tmp_path, batches(rows=other))
    with pytest.raises(ValueError, match=r"holds 36 entries, the batches have only 13"):
        write(tmp_path, batches(rows=ROWS[:2]))


# -- bad folders and bad values


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no store of activations: it has no index.json"):
        ActivationStore.open(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError,
        match=r"new or empty folder is required, or that of a store of activations; .* holds notes.txt",
    ):
        write(tmp_path)
    for text in ("{", "[]", '{"weight_map": {}}'):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"the folder of a store of activations is required, .*index.json"
        ):
            ActivationStore.open(tmp_path)
    (tmp_path / "index.json").write_text('{"format": "interp activations 1", "dtype": "float16"}')
    with pytest.raises(ValueError, match=r"another version of interp: StoreIndex differs in \['complete'"):
        ActivationStore.open(tmp_path)


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    found = write(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    good = path.read_bytes()
    found.verify()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is corrupt: its SHA-256"):
        found.verify()
    path.write_bytes(good[:-8])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors must have .* bytes, got .*truncated"):
        ActivationStore.open(tmp_path)
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is not a readable shard"):
        found.read(POST, slice(8, 9))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"shard-00001.safetensors is missing"):
        ActivationStore.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["shards"][2].update(entries=0), r"00002.*: row is listed as \[0\] I64, got \[8\] I64"),
        (lambda index: index["shards"][2].update(entries=3), r"00002.*: row is listed as \[3\] I64, got \[8\] I64"),
        (lambda index: index["shards"].reverse(), r"shard 0 must be shard-00000.*, got shard-00004"),
        (lambda index: index["shards"].pop(0), r"shard 0 must be shard-00000.*, got shard-00001"),
        (lambda index: index["shards"].insert(1, index["shards"][0]), r"shard 1 must be shard-00001.*, got shard-0"),
        (lambda index: index["shards"].pop(), r"holds shard-00004.safetensors, which its index.json does not list"),
        (lambda index: index["shards"].clear(), r"is not finished, it holds 0 entries"),
        (lambda index: index["shapes"].update({POST: [8]}), r"hook_post is listed as \[8, 8\] F32, got \[8, 40\] F32"),
        (lambda index: index["shapes"].clear(), r"a shape for each of the sites .* got float32 and shapes of none"),
        (lambda index: index.update(sites=[POST]), r"a shape for each of the sites .* got float32 and shapes of"),
        (lambda index: index.update(dtype="float16"), r"hook_post is listed as \[8, 40\] F16, got \[8, 40\] F32"),
        (lambda index: index.update(dtype="int8"), r"a dtype of float16, bfloat16, float32 .* got int8"),
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_its_shards_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    write(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    change(index)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        ActivationStore.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda post: post.T.contiguous(), r"hook_post is listed as \[8, 40\] F32, got \[40, 8\] F32"),
        (lambda post: post.flatten(), r"hook_post is listed as \[8, 40\] F32, got \[320\] F32"),
        (lambda post: post.bfloat16(), r"hook_post is listed as \[8, 40\] F32, got \[8, 40\] BF16"),
        (lambda post: post[0, 0].clone(), r"hook_post is listed as \[8, 40\] F32, got \[\] F32"),
    ],
)
def test_a_shard_of_other_shapes_is_refused_when_read(
    change: Callable[[Tensor], Tensor], message: str, tmp_path: Path
) -> None:
    found = write(tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    tensors = load_file(path)
    save_file({**tensors, POST: change(tensors[POST])}, path)
    with pytest.raises(ValueError, match=message):
        found.read(POST)


def test_a_shard_in_the_place_of_another_is_refused(tmp_path: Path) -> None:
    found = write(tmp_path)
    shutil.copy(tmp_path / "shard-00001.safetensors", tmp_path / "shard-00000.safetensors")
    for read in (lambda: ActivationStore.open(tmp_path), lambda: found.read(POST), lambda: write(tmp_path)):
        with pytest.raises(
            ValueError, match=r"shard-00000.safetensors holds what was written as shard-00001"
        ):
            read()


def loud(factor: float) -> HookedTransformer:
    """A model whose last residual stream is large."""
    network = build("no-norm", torch.float32)
    copy = type(network)(network.config)
    copy.load_state_dict({name: factor * value for name, value in network.state_dict().items()})
    return HookedTransformer(copy.eval().requires_grad_(False))


def test_values_outside_the_dtype_are_refused_never_stored_as_infinity(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"up to 65504 fit torch.float16, got .* at 'blocks.1.hook_resid_post': store"
    ):
        store_activations(loud(20.0), batches(), [STREAM], tmp_path / "half")
    wide = store_activations(loud(20.0), batches(), [STREAM], tmp_path / "wide", dtype=torch.bfloat16)
    assert bool(wide.read(STREAM).isfinite().all()) and float(wide.read(STREAM).abs().max()) > 65504
    with pytest.raises(ValueError, match=r"finite activations are required"):
        store_activations(loud(float("nan")), batches(), [STREAM], tmp_path / "nan")


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"nearest: blocks.0.mlp.hook_post"):
        write(tmp_path, sites=("blocks.0.mlp.hook_pst",))
    with pytest.raises(ValueError, match=r"'blocks.0.attn.hook_pattern' is \[batch row, query head"):
        write(tmp_path, sites=("blocks.0.attn.hook_pattern",))
    with pytest.raises(ValueError, match="a list of distinct sites is required"):
        write(tmp_path, sites=(POST, POST))
    with pytest.raises(ValueError, match=r"dtype must be one of float16, bfloat16, float32, got float64"):
        write(tmp_path, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"at least one entry per shard"):
        store_activations(model(), batches(), SITES, tmp_path, shard_entries=0)
    with pytest.raises(ValueError, match=r"at least one (entry|prompt) is required"):
        write(tmp_path, [])


def test_the_index_says_what_is_stored(tmp_path: Path) -> None:
    write(tmp_path)
    said = json.loads((tmp_path / "index.json").read_text())
    width = model().transformer.config.d_model
    assert said["shapes"] == {POST: [40], Z: [4, 6], STREAM: [width]}
    assert said["model_sha256"] == provenance.model_hash(model().transformer)
    assert [s["file"] for s in said["shards"]] == [f"shard-{i:05d}.safetensors" for i in range(5)]


def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path) -> None:
    """Also where a whole window of an iterator has none that can: the rest is read on."""
    given = ["a cat", "", *([""] * 300), "the dog"]
    texts = HookedTransformer.from_pretrained("demo-attn-2l")
    for name, source in (("list", given), ("iterator", iter(given))):
        data = Stream(open_source(source), texts.text, tokens_per_batch=64, rows_per_window=8)
        found = store_activations(texts, data, ["blocks.0.hook_resid_post"], tmp_path / name)
        assert found.index.rejected == 301
        assert found.read("row").unique().tolist() == [0, 302]
        assert ActivationStore.open(tmp_path / name).index == found.index
