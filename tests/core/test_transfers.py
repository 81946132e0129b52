"""Copies to a device that is simulated and back: every number arrives, in one copy, and nothing else waits."""

import copy
from collections.abc import Callable

import pytest
import torch

from interp.core.transfers import LOOK, check, checks_together, ended, to_device, to_host
from interp.data.batch import Batch
from interp.runs import kept
from tests.configs import build
from tests.contract.simulated import Simulated, on_device, plugged_in
from tests.forking import forked


def test_tensors_of_all_kinds_and_layouts_are_fetched_in_one_copy() -> None:
    assert forked(_fetched) == (1, True)


def _fetched() -> tuple[int, bool]:
    """How often the host waited, and whether all that arrived is what was sent."""
    device = plugged_in()
    numbers = torch.arange(24.0).reshape(2, 3, 4)
    here = {
        "double": numbers.double(), "half": numbers.half(), "bfloat": numbers.bfloat16(), "int": numbers.int(),
        "bool": numbers > 3, "byte": numbers.byte(), "turned": numbers.mT, "one": numbers[0, 0, :1].expand(5, 1),
        "wide": numbers[:, :1].expand(2, 7, 4), "steps": numbers[..., ::2], "number": torch.tensor(3.5),
        "none": numbers[:0], "complex": torch.complex(numbers, -numbers),
    }  # fmt: skip
    with Simulated() as asked:
        there = {name: to_device(value, device) for name, value in here.items()}
        back = to_host({**there, "host": numbers})
    same = [
        torch.equal(back[name], value) and back[name].dtype == value.dtype for name, value in here.items()
    ]
    return asked.waits, all(same) and back["host"] is not None and asked.sent == len(here)


def test_a_device_is_asked_now_and_then_whether_a_search_is_over() -> None:
    here, there = torch.tensor(True), torch.ones((), dtype=torch.bool, device="meta")
    assert ended(here, 0) and not ended(~here, LOOK - 1)
    assert not any(ended(there, step) for step in range(LOOK - 1))
    with pytest.raises(RuntimeError):  # it is looked at, and has no number
        ended(there, LOOK - 1)


def test_on_the_host_nothing_is_copied() -> None:
    value = torch.ones(3, requires_grad=True)
    found = to_host({"a": value})["a"]
    assert found.data_ptr() == value.data_ptr() and not found.requires_grad
    assert to_device(found, torch.device("cpu")) is found
    assert to_device([[1, 2]], torch.device("cpu")).tolist() == [[1, 2]]


def raised(act: Callable[[], object]) -> str:
    """What the ValueError says that this raises."""
    with pytest.raises(ValueError, match=r"first|second") as found:
        act()
    return str(found.value)


def failing(flag: torch.Tensor) -> Callable[[], None]:
    """A check that fails, and then something else that does, inside of a `with`."""

    def act() -> None:
        with checks_together():
            check(flag, lambda: ValueError("first"))
            raise KeyError("later")

    return act


def test_a_check_on_the_host_raises_at_once_wherever_it_stands() -> None:
    assert raised(failing(torch.tensor(False))) == "first"
    check(torch.tensor(False), lambda: None)  # a closer look found nothing wrong


def test_checks_of_a_device_are_read_together_and_the_first_failed_raises() -> None:
    assert forked(_checked) == (1, 1, ["second", "first", "second"])


def _checked() -> tuple[int, int, list[str]]:
    """The waits of checks inside and outside, and what is raised: settled, before something else inside, at once."""
    device = plugged_in()
    with Simulated() as asked:
        fine, bad = (to_device(torch.tensor(each), device) for each in (True, False))

        def three() -> None:
            for flag, name in ((fine, "first"), (bad, "second"), (bad, "third")):
                check(flag, lambda name=name: ValueError(name))  # type: ignore[misc]

        with checks_together() as checks:
            three()
        flags, waits = to_host(checks.flags), asked.waits
        check(fine, lambda: ValueError("never"))
        once = asked.waits - waits
        said = [raised(lambda: checks.settle(flags)), raised(failing(bad)), raised(three)]
    return waits, once, said


def test_a_batch_knows_its_copy_on_the_host() -> None:
    assert forked(_known) == 1


def _known() -> int:
    """How often the host waited, once all that a copy tells was asked."""
    device = plugged_in()
    batch = Batch.of([[1, 2, 3], [4, 5]]).with_answers(torch.tensor([7, 8]), None)
    with Simulated() as asked:
        there = batch.to(device)
        assert there.host() is batch and there.tokens.device == device
        some = there.rows(torch.tensor([1, 1, 0]))
        assert (
            some.host().tokens.tolist() == some.tokens.tolist()
        )  # the one wait, for the tokens of the device
        own, other = Batch(batch.tokens, corrupt=batch.tokens.flip(0)).to(device).pair()
        assert own.host().tokens.tolist() == [[1, 2, 3], [4, 5, 0]] and other.host().tokens.tolist()[0] == [
            4,
            5,
            0,
        ]
    return asked.waits


def test_weights_on_a_device_are_told_apart_by_a_single_number() -> None:
    assert forked(_told_apart) == (1, 1, 4)


def _told_apart() -> tuple[int, int, int]:
    """Waits of one look; how many looks at equal weights give, and at weights of which one number differs."""
    plugged_in()
    network = build("gpt2")
    with Simulated() as asked:
        first = kept.content(on_device(network))
    with Simulated():
        same = {first, kept.content(on_device(network))}
    others = {first}
    for name in ("embed.weight", "blocks.0.attn.qkv.weight", "blocks.1.mlp.out.bias"):
        changed = copy.deepcopy(build("gpt2"))
        changed.get_parameter(name).data.flatten()[3] += 1e-9
        with Simulated():
            others.add(kept.content(on_device(changed)))
    return asked.waits, len(same), len(others)
