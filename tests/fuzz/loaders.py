"""Every loader with every kind of damage to every file it reads, one at a time, and every family's config field by
field."""

import contextlib
import functools
import importlib
import inspect
import json
import random
import re
import shutil
import tempfile
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py  # noqa: F401 - its import looks at the machine: before any call is watched
import pandas as pd
import sentencepiece
import torch
import transformers
import xarray as xr

import interp
import interp.runs
from interp.cli.kept_runs import record_lines
from interp.core.hints import hints_of
from interp.families import config_of, save
from tests.configs import build
from tests.contract.calls import (
    TOKENIZER,
    TOKENS,
    chats_file,
    directions,
    facts_file,
    graph_file,
    mend,
    mib_file,
    model,
    sae_folder,
    state,
    whole_circuit,
)
from tests.families import gguf_files
from tests.families.oracle import CASES, hf_config, hf_model
from tests.features.formats.test_layouts import WRITTEN as DICTIONARIES
from tests.features.formats.written import EXAMPLES, Example
from tests.fuzz.damage import ODD, Damage, changed, damages, paths
from tests.fuzz.judge import Case
from tests.tiny import gpt2_tokenizer

FAMILY, CONFIGS_FAMILY = "damaged files", "odd configs"
Opened = Callable[[Path], object]


@dataclass(frozen=True)
class Loader:
    """What is read, made once in a folder, and how it is read and used."""

    make: Callable[[Path], object]
    read: Opened
    covers: tuple[str, ...] = ()
    """The public functions and methods that this is a reading of."""


def _text(answer: interp.HookedTransformer) -> object:
    return answer.to_tokens("The cat sat") if answer.text.tokenizer is not None else None


def _graph(path: Path) -> object:
    found = interp.circuits.read_attribution_graph(path / "graph.json")
    found.table()
    return found.circuit()


def _theirs(path: Path) -> object:
    return interp.circuits.read_attribution_graph(path / "graph.json").table()


def _make_theirs(path: Path) -> None:
    """A graph as others write it: without what we note in ours, with a feature, a supernode and an attention score."""
    held = json.loads(graph_file().read_text())
    del held["metadata"]["generation_settings"]
    held["nodes"][0] |= {"feature": 7, "influence": 0.5, "activation": 1.5}
    held["qParams"]["supernodes"] = [["a group", held["nodes"][0]["node_id"]]]
    one, other = (held["nodes"][i]["node_id"] for i in range(2))
    held["qk_only_nodes"] = {"0_bias_0": held["nodes"][0] | {"node_id": "0_bias_0", "feature": None}}
    held["nodes"][1]["qk_tracing_results"] = {
        "pair_wise_contributors": [[one, "0_bias_0", 0.5]],
        "top_q_marginal_contributors": [[one, 0.5], [other, 0.25]],
        "top_k_marginal_contributors": [],
    }
    (path / "graph.json").write_text(json.dumps(held))


def _dictionary(example: Example) -> Opened:
    """A dictionary in a layout of others, read and used: of several layers nothing is read before."""

    def read(path: Path) -> object:
        found = interp.features.load(path, **example.given)
        if isinstance(found, interp.features.CrossLayerTranscoder):
            return found({layer: torch.zeros(2, held.shape[0]) for layer, held in found.layers.items()})
        return found(torch.zeros(2, *found.W_enc.shape[:-1]))

    return read


def _copied(source: Callable[[], Path]) -> Callable[[Path], object]:
    return lambda path: shutil.copytree(source(), path, dirs_exist_ok=True)


def _hf(name: str) -> Callable[[Path], object]:
    return lambda path: hf_model(name).save_pretrained(path)


def _gpt2(path: Path) -> None:
    """A small random GPT-2 with its tokenizer, as Hugging Face writes it."""
    config = transformers.GPT2Config(
        vocab_size=model().cfg.d_vocab,
        n_positions=12,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    gpt2_tokenizer().save_pretrained(path)


def _pieces(path: Path) -> None:
    with tempfile.TemporaryDirectory() as where:
        text = Path(where) / "text.txt"
        text.write_text("the cat sat on the mat\na dog ran to the cat\n" * 30)
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(Path(where) / "tokenizer"), vocab_size=40, model_type="bpe",
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        shutil.copy(Path(where) / "tokenizer.model", path)


def _settled_pieces(path: Path) -> None:
    _pieces(path)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "chat_template": "{{ messages }}"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _spelled(path: Path) -> object:
    found = interp.families.tokenizer_of(path)
    return None if found is None else (found.decode(found.encode("the cat")), found.piece(1))


def _store(path: Path) -> object:
    return interp.runs.store_activations(model(), TOKENS, ["blocks.0.hook_resid_post"], path, shard_entries=8)


def _stored(path: Path) -> object:
    found = interp.runs.ActivationStore.open(path)
    return (
        found.read("blocks.0.hook_resid_post"),
        found.shard(0),
        next(found.batches("blocks.0.hook_resid_post", 4)),
    )


NOUNS = (
    r"\bcheckpoint\b",
    r"requires shape",
    "tensors are not understood",
    r"\bmodel_type\b",
    "is the name of no file",
    "the tokenizer has ids",
    r"\b[A-Z]\w+(Config|MLP|Norm|Rotary|Scaling|MoE) requires",
    "^(MLP|MoE|Rotary)",
)
"""What a refusal names where a damage shows elsewhere: a config's number in a tensor's shape or in our config."""
QUESTIONS = (interp.lenses.LogitLens(top=2),)


def _run(path: Path) -> object:
    return interp.run(QUESTIONS, model(), TOKENS, out=path)


def _resumed(path: Path) -> object:
    return interp.run(QUESTIONS, model(), TOKENS, out=path, resume=True)


def _record(path: Path) -> object:
    record = interp.runs.Record.create(path, "fuzz", interp.tasks.RepeatedTokens(4, 2, 2))
    with contextlib.suppress(KeyboardInterrupt), record:
        record.step("first", lambda: xr.Dataset({"x": ("a", [1.0])}))
        record.step("second", lambda: pd.DataFrame({"a": [1]}))
        raise KeyboardInterrupt  # what is interrupted can be gone on with
    return record.folder.rename(path / "run")


def _opened(path: Path) -> object:
    record = interp.runs.Record.open(path / "run")
    return [*record_lines(record)], [record.result(name) for name in record.run.steps]


def _again(path: Path) -> object:
    with interp.runs.Record.resume(path / "run", interp.tasks.RepeatedTokens(4, 2, 2)) as record:
        return record.step("first", lambda: xr.Dataset({"x": ("a", [1.0])}))


def _lens(path: Path) -> None:
    interp.lenses.TunedLens.untrained(model()).save(path / "lens.safetensors")


def _jacobian(path: Path) -> None:
    lens = interp.lenses.jacobian_lens(model(), [[1, 2, 3, 4]] * 3, skip=1)
    lens.save(path / "lens.safetensors")
    lens.to_neuronpedia(path / "lens.pt")


def _state(path: Path) -> None:
    torch.save({"model": state()[0], "config": state()[1]}, path / "state.pt")
    (path / "config.json").write_text(json.dumps(state()[1], default=str))


def _llama2c(path: Path) -> None:
    from tests.compat.test_llama2c import legacy, version_1

    (path / "old.bin").write_bytes(legacy(True))
    (path / "new.bin").write_bytes(version_1(False))


def _make_facts(path: Path) -> None:
    """A table of facts, and the list of a paper."""
    shutil.copy(facts_file(), path)


def _make_relation(path: Path) -> None:
    samples = [{"subject": "the cat", "object": "a dog"}, {"subject": "Mary", "object": "John"}]
    held = {"name": "pets", "prompt_templates": ["The pet of {} is"], "samples": samples}
    (path / "relation.json").write_text(json.dumps(held))


def _rows(name: str) -> Opened:
    def read(path: Path) -> object:
        source = interp.data.open_source(path / name)
        return [*source.rows(0, 4)], interp.logit_lens(model(), path / name, top=1)

    return read


def _make_rows(path: Path) -> None:
    (path / "rows.txt").write_text("The cat sat\n\non the mat\n")
    (path / "rows.jsonl").write_text('{"text": "The cat"}\n{"text": "sat"}\n')
    pd.DataFrame({"text": ["The cat", "sat"]}).to_parquet(path / "rows.parquet")


def _only(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """What is made, without the files that are not read."""

    def made(path: Path) -> None:
        make(path)
        for file in path.iterdir():
            if file.name not in name.split():
                file.unlink()

    return made


def _trained(path: Path, resume: bool = False) -> object:
    plan = interp.lab.training.Training(steps=2, rows=2, evaluation_rows=2, keep_seconds=0.0)
    data = interp.tasks.RepeatedSequences(8, 12, 3, 4)
    return interp.lab.training.train(
        interp.lab.training.attention_only(1, 8, 12), data, plan, out=path, resume=resume
    )


def _left_out(path: Path) -> object:
    task = interp.tasks.RepeatedSequences(8, 12, 3, 4)
    rows, queries = (task.batch(interp.tasks.Place(0, step), 2) for step in (0, 1))
    plan = interp.lab.training.Training(steps=1, rows=2)
    config = interp.lab.training.attention_only(1, 8, 12)
    return interp.lab.training.leave_out(config, rows, queries, [[0]], plan, out=path)


def tokenized(path: Path, n_layers: int = 1, n_ctx: int = 8) -> None:
    """A small random model with the tokenizer that the demo models have."""
    vocabulary = interp.families.tokenizer.FileTokenizer.read(TOKENIZER, "<|bos|>").n_ids
    torch.manual_seed(0)
    config = interp.model.ModelConfig(
        n_layers=n_layers, d_model=8, n_heads=2, n_ctx=n_ctx, d_vocab=vocabulary
    )
    save(interp.model.build(config), path)
    shutil.copy(TOKENIZER, path / "tokenizer.json")


LOADERS: Mapping[str, Loader] = {
    "a folder of ours": Loader(
        tokenized, lambda path: _text(interp.HookedTransformer.from_pretrained(path)),
        ("HookedTransformer.from_pretrained", "families.from_folder", "families.any_from_folder"),
    ),
    "a GPT-2 of Hugging Face": Loader(
        _gpt2,
        lambda path: _text(interp.HookedTransformer.from_pretrained(path)),
        ("families.tokenizer_of", "families.tokenizer_for"),
    ),
    "a llama of Hugging Face": Loader(
        _hf("llama"),
        lambda path: (interp.HookedTransformer.from_pretrained(path), interp.families.ends_of(path)),
        ("families.is_encoder_decoder", "families.ends_of"),
    ),
    "shards": Loader(
        lambda path: hf_model("llama").save_pretrained(path, max_shard_size="20KB"),
        lambda path: interp.HookedTransformer.from_pretrained(path),
    ),
    "a pickle": Loader(
        lambda path: (
            save(build("gpt2"), path), torch.save(build("gpt2").state_dict(), path / "pytorch_model.bin"),
            (path / "model.safetensors").unlink(),
        ),
        lambda path: interp.HookedTransformer.from_pretrained(path),
    ),
    "an encoder-decoder": Loader(
        _hf("t5"), lambda path: interp.HookedEncoderDecoder.from_pretrained(path),
        ("HookedEncoderDecoder.from_pretrained",)
    ),
    "a GGUF file": Loader(
        lambda path: gguf_files.write(path / "model.gguf", hf_model("llama")),
        lambda path: interp.HookedTransformer.from_pretrained(path),
    ),
    "pieces": Loader(_pieces, _spelled, ("families.SentencePieceTokenizer.read",)),
    "pieces with settings": Loader(_settled_pieces, _spelled, ("families.tokenizer_in",)),
    "a vocabulary": Loader(
        lambda path: shutil.copy(TOKENIZER, path),
        lambda path: interp.lab.training.Vocabulary.read(path / "tokenizer.json"),
        ("lab.training.Vocabulary.read",),
    ),
    "an autoencoder": Loader(_copied(sae_folder), interp.features.load, ("features.load",)),
    **{f"a dictionary of {name}": Loader(make, interp.features.load) for name, make in DICTIONARIES.items()},
    **{f"a dictionary: {example.make.__name__}": Loader(example.make, _dictionary(example)) for example in EXAMPLES},
    "a graph of ours": Loader(lambda path: shutil.copy(graph_file(), path), _graph,
    ("circuits.read_attribution_graph",)),
    "a graph of others": Loader(_make_theirs, _theirs),
    "scores of MIB": Loader(
        lambda path: shutil.copy(mib_file(), path),
        lambda path: interp.circuits.read_mib(path / "scores.json", model()),
        ("circuits.read_mib",),
    ),
    "scores of MIB as tensors": Loader(
        lambda path: interp.circuits.write_mib(
            path / "scores.pt", model(), interp.circuits.read_mib(mib_file(), model()).scores
        ),
        lambda path: interp.circuits.read_mib(path / "scores.pt", model()),
    ),
    "a circuit": Loader(
        lambda path: whole_circuit().save(path / "circuit.json"),
        lambda path: interp.circuits.Circuit.load(path / "circuit.json").nodes, ("circuits.Circuit.load",),
    ),
    "facts": Loader(
        _make_facts,
        lambda path: [interp.tasks.read_facts(path / "facts.json").asked(model().text).batch.tokens.tolist()],
        ("tasks.read_facts",),
    ),
    "a relation": Loader(_make_relation, lambda path: [*interp.tasks.read_facts(path / "relation.json")]),
    "a chat": Loader(
        lambda path: shutil.copy(chats_file(), path),
        lambda path: interp.data.read_chats(path / "chats.json"),
        ("data.read_chats",),
    ),
    "a direction": Loader(
        lambda path: directions()[0].save(path / "direction.safetensors", model()),
        lambda path: interp.causal.Subspace.load(path / "direction.safetensors", model()).add(2.0),
        ("causal.Subspace.load",),
    ),
    "a tuned lens": Loader(
        _lens, lambda path: interp.lenses.TunedLens.load(path / "lens.safetensors", model()), ("lenses.TunedLens.load",)
    ),
    "a MEND": Loader(
        lambda path: mend().save(path / "mend.safetensors"),
        lambda path: interp.editing.Mend.load(path / "mend.safetensors", model()), ("editing.Mend.load",)
    ),
    "a Jacobian lens": Loader(
        _only("lens.safetensors", _jacobian),
        lambda path: interp.lenses.FittedJacobianLens.load(path / "lens.safetensors", model()),
        ("lenses.FittedJacobianLens.load",),
    ),
    "a Jacobian lens of others": Loader(
        _only("lens.pt", _jacobian),
        lambda path: interp.lenses.FittedJacobianLens.from_neuronpedia(path / "lens.pt", model()),
        ("lenses.FittedJacobianLens.from_neuronpedia",),
    ),
    "a store": Loader(_store, _stored, ("runs.ActivationStore.open",)),
    "a store that goes on": Loader(_store, _store, ("runs.store_activations",)),
    "a run that goes on": Loader(_run, _resumed, ("run",)),
    "a record": Loader(_record, _opened, ("runs.Record.open", "runs.Record.create")),
    "a record that goes on": Loader(_record, _again, ("runs.Record.resume",)),
    "a training that goes on": Loader(_trained, lambda path: _trained(path, resume=True), ("lab.training.train",)),
    "a study that goes on": Loader(_left_out, _left_out, ("lab.training.leave_out",)),
    "a state of TransformerLens": Loader(
        _only("state.pt", _state), lambda path: interp.compat.load_hooked(path / "state.pt"), ("compat.load_hooked",)
    ),
    "its config": Loader(_state, lambda path: interp.compat.load_hooked(path / "state.pt", path / "config.json")),
    "an old llama2.c file": Loader(
        _only("old.bin", _llama2c), lambda path: interp.compat.load_llama2c(path / "old.bin"), ("compat.load_llama2c",)
    ),
    "a new llama2.c file": Loader(_only("new.bin", _llama2c),
    lambda path: interp.compat.load_llama2c(path / "new.bin")),
    **{
        f"rows of {kind}": Loader(_only(f"rows.{kind}", _make_rows), _rows(f"rows.{kind}"))
        for kind in ("txt", "jsonl", "parquet")
    },
}  # fmt: skip


@functools.cache
def whole(name: str) -> Path:
    """The undamaged files of a loader."""
    path = Path(tempfile.mkdtemp()) / "it"
    path.mkdir()
    LOADERS[name].make(path)
    return path


def cases(seed: object = 0, each: int | None = None) -> Iterator[Case]:
    """Every damage to every file of every loader; with `each` so many to one file of each, drawn by the seed."""
    for name in LOADERS:
        top, draw = whole(name), random.Random(f"{seed} {name}")
        files = sorted(file for file in top.rglob("*") if file.is_file())
        for file in files if each is None else [draw.choice(files)]:
            found = damages(file, random.Random(f"{seed} {name} {file.name}"))
            for damage in found if each is None else draw.sample([*found], each):
                yield _case(name, file.relative_to(top), damage)


def _case(name: str, place: Path, damage: Damage) -> Case:
    def call() -> object:
        path = Path(tempfile.mkdtemp()) / "it"
        shutil.copytree(whole(name), path)
        damage.done(path / place)
        return LOADERS[name].read(path)

    def words() -> list[str]:
        names = [rf"\b{re.escape(each[:40])}" for each in damage.names if each]
        return [place.stem, r"/it\b", *names, *NOUNS]

    return Case(FAMILY, name, f"{place}: {damage.what}", call, words)


def configs() -> Iterator[Case]:
    """Every field of the config of every family with every odd value."""
    for name in CASES:
        values = json.loads(hf_config(name).to_json_string(use_diff=False))
        known = {rf"\b{key}\b" for path in paths(values) for key in path if isinstance(key, str)} | {
            r"\blayers\b"
        }
        for path in paths(values):
            where = ".".join(map(str, path))
            for shown_, odd in ODD:
                yield Case(
                    CONFIGS_FAMILY, name, f"{where} = {shown_}", functools.partial(_configured, values, path, odd),
                    functools.partial(_told, known, shown_),
                )  # fmt: skip


def _told(known: set[str], shown_: str) -> list[str]:
    return [*known, re.escape(f"got {shown_}"[:12]), *NOUNS]


def _configured(values: object, path: tuple[str | int, ...], odd: object) -> object:
    given = changed(values, path, odd)
    assert isinstance(given, dict)
    return config_of(given)


def readers() -> Iterator[str]:
    """Every public function and class method that is given a place of files, by its name."""
    from tests.contract.calls import public_names

    for name, function in public_names():
        if not isinstance(function, type) and _takes_files(function):
            yield name
    for wing in ("", *interp.ROOMS):
        module = importlib.import_module(f"interp.{wing}" if wing else "interp")
        for name in module.__all__ if wing else interp.HOMES:
            kind = getattr(module, name)
            for own, method in vars(kind).items() if isinstance(kind, type) else ():
                if (
                    isinstance(method, classmethod)
                    and not own.startswith("_")
                    and _takes_files(method.__func__)
                ):
                    yield f"{wing}.{name}.{own}".lstrip(".")


def _takes_files(function: Callable[..., object]) -> bool:
    hints = hints_of(inspect.unwrap(function))
    return any(Path in (hint, *typing.get_args(hint)) for hint in hints.values())
