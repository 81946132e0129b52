"""Evaluations and training: losses by a slow loop, the IOI task on planted logits, a model that learns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.compat.transformer_lens import evals
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from interp.compat.transformer_lens.train import HookedTransformerTrainConfig, train

IDS: dict[str, int] = {}


class Words:
    """A tokenizer of words (with the space before them)."""

    bos_token_id = 0

    def encode(self, text: str) -> list[int]:
        pieces = text.replace(" ", "\0 ").replace(".", "\0.").split("\0")
        return [IDS.setdefault(piece, len(IDS) + 1) for piece in pieces if piece]


class Bigrams:
    """A model whose logits are a table's rows."""

    def __init__(self, size: int) -> None:
        self.table = torch.randn(size, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.out = torch.randn(7, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.cfg = SimpleNamespace(default_prepend_bos=True)
        self.tokenizer = Words()
        self.seen: list[Tensor] = []

    def __call__(self, tokens: Tensor, return_type: str = "logits") -> Tensor:
        self.seen.append(tokens)
        logits = self.table[tokens] @ self.out
        if return_type == "logits":
            return logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("prepend_bos", [None, False])
def test_induction_loss_is_the_mean_over_the_second_half(prepend_bos: bool | None) -> None:
    model = Bigrams(20000)
    found = evals.induction_loss(model, batch_size=2, subseq_len=5, prepend_bos=prepend_bos, device="cpu")
    (tokens,) = model.seen
    assert (tokens[:, 0] == 0).all() == (prepend_bos is None)
    assert torch.equal(tokens[:, 1:5], tokens[:, 6:]) and tokens[:, 1:].min() >= 100
    losses = [
        -(model.table[row[i]] @ model.out).log_softmax(-1)[row[i + 1]] for row in tokens for i in range(6, 9)
    ]
    torch.testing.assert_close(found, torch.stack(losses).mean())


def test_a_dataset_is_evaluated_batch_by_batch_up_to_the_limit() -> None:
    model, rows = Bigrams(30), [{"tokens": torch.randint(0, 30, (2, 4))} for _ in range(5)]
    expected = [float(model(row["tokens"], return_type="loss")) for row in rows[:3]]
    assert evals.evaluate_on_dataset(model, rows, truncate=2, device="cpu") == pytest.approx(
        sum(expected) / 3
    )


def test_ioi_prompts_hold_the_repeated_name_twice_and_end_with_the_answer() -> None:
    data = evals.IOIDataset(Words(), num_samples=6, symmetric=True, seed=0)
    assert len(data) == 6
    for one, other in zip(data.samples[::2], data.samples[1::2], strict=True):
        assert (one["IO"], one["S"]) == (other["S"], other["IO"])
    for sample, encoded in zip(data.samples, data, strict=False):
        words = sample["text"].replace(",", "").replace(".", "").split()
        assert words.count(sample["S"].strip()) == 2 and words[-1] == sample["IO"].strip()
        assert encoded["prompt"][0] == 0 and encoded["prompt"][-1] == encoded["IO"]
    again = evals.IOIDataset(Words(), num_samples=6, symmetric=True, seed=0)
    assert again.samples == data.samples


def test_ioi_reads_the_logits_before_the_answer() -> None:
    data = evals.IOIDataset(Words(), num_samples=9, seed=1)
    model = Bigrams(60)
    found = evals.ioi_eval(model, data, batch_size=4)
    differences = []
    for sample in data.samples:
        ids = Words().encode(sample["text"])
        logits = model.table[ids[-2]] @ model.out
        answer, other = (Words().encode(sample[name])[0] for name in ("IO", "S"))
        differences.append(float(logits[answer] - logits[other]))
    assert found["Logit Difference"] == pytest.approx(sum(differences) / 9)
    assert found["Accuracy"] == pytest.approx(sum(d > 0 for d in differences) / 9)


@pytest.mark.parametrize("name", ["make_wiki_data_loader", "mmlu_eval", "evaluate"])
def test_what_would_download_says_what_to_use(name: str) -> None:
    with pytest.raises(NotImplementedError, match="datasets library"):
        getattr(evals, name)(None)


class Rows(torch.utils.data.Dataset[Any]):
    """Counting sequences."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": (torch.arange(6) + i) % 11}


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "SGD"])
def test_training_teaches_to_count_and_leaves_the_config_alone(
    optimizer: str, capsys: Any, tmp_path: Any
) -> None:
    model = HookedTransformer(
        {
            "n_layers": 1,
            "d_model": 16,
            "n_ctx": 8,
            "d_head": 8,
            "n_heads": 2,
            "d_vocab": 11,
            "act_fn": "relu",
            "seed": 0,
            "device": "cpu",
        }
    )
    tokens = torch.stack([Rows()[i]["tokens"] for i in range(16)])
    before = model(tokens, return_type="loss").item()
    config = HookedTransformerTrainConfig(
        num_epochs=15, batch_size=8, lr=0.3 if optimizer == "SGD" else 0.02, optimizer_name=optimizer, device="cpu",
        warmup_steps=2, max_grad_norm=1.0, print_every=10, save_every=1, save_dir=str(tmp_path),
        weight_decay=1e-4 if optimizer == "AdamW" else None, momentum=0.5,
    )  # fmt: skip
    assert train(model, config, Rows()) is model
    assert model(tokens, return_type="loss").item() < before - 1
    assert config.wandb_project_name is None
    assert "\nEpoch 1 Samples 8 Step 0 Loss " in f"\n{capsys.readouterr().out}"
    saved = torch.load(tmp_path / "model_1.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_an_unknown_optimizer_is_refused() -> None:
    config = HookedTransformerTrainConfig(num_epochs=1, batch_size=1, optimizer_name="Lion", device="cpu")
    with pytest.raises(ValueError, match="Lion not supported"):
        train(nn.Linear(1, 1), config, Rows())


def test_the_sanity_check_is_the_loss_on_a_text() -> None:
    class Model:
        def __call__(self, text: str, return_type: str) -> Tensor:
            assert isinstance(text, str) and return_type == "loss"
            return torch.tensor(3.0)

    assert evals.sanity_check(Model()) == 3
