"""TransformerLens' rough evaluations that need no download: a sanity check, induction and the IOI task.

The others raise with the native way: `interp.zoo` has tasks with counted answers, `interp.dynamics.in_context` the
losses.
"""

import random
from collections.abc import Callable
from typing import Any, NoReturn, TypedDict

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from interp.compat.transformer_lens.defaults import override_or_use_default_value
from interp.compat.transformer_lens.devices import warn_if_mps
from interp.compat.transformer_lens.losses import lm_cross_entropy_loss

_TEXT = (
    "A language model that works predicts the next word of a plain English sentence better than chance. If the loss on "
    "this text is below five, the model is probably in order; if it is above seven, something has gone wrong with it."
)


def sanity_check(model: Any) -> Float[Tensor, ""]:
    """The loss on a short English text: below 5 nats the model is probably in order, above 7 something is wrong.

    The text is our own, so the number is not the one TransformerLens gives.
    """
    return model(_TEXT, return_type="loss")


@torch.inference_mode()
def evaluate_on_dataset(model: Any, data_loader: Any, truncate: int = 100, device: str = "cuda") -> float:
    """The mean over batches `{"tokens": ...}` of the model's loss; stops after `truncate + 1` of them."""
    warn_if_mps(device)
    losses: list[float] = []
    for batch in tqdm(data_loader, delay=1, leave=False):
        losses.append(float(model(batch["tokens"].to(device), return_type="loss").mean()))
        if len(losses) > truncate:
            break
    return sum(losses) / len(losses)


@torch.inference_mode()
def induction_loss(
    model: Any,
    tokenizer: Any = None,
    batch_size: int = 4,
    subseq_len: int = 384,
    prepend_bos: bool | None = None,
    device: str | torch.device = "cuda",
) -> Float[Tensor, ""]:
    """The mean loss on the second half of random tokens (ids 100 to 19999) repeated twice.

    prepend_bos: whether BOS takes the place of the first token; None = the model's default.
    """
    warn_if_mps(device)
    half = torch.randint(100, 20000, (batch_size, subseq_len)).to(device)
    tokens = half.repeat(1, 2)
    if override_or_use_default_value(model.cfg.default_prepend_bos, override=prepend_bos):
        tokens[:, 0] = (model.tokenizer if tokenizer is None else tokenizer).bos_token_id
    losses = lm_cross_entropy_loss(model(tokens, return_type="logits"), tokens, per_token=True)
    return losses[:, subseq_len + 1 :].mean()


class Encoded(TypedDict):
    """One IOI prompt and its two names, as ids."""

    prompt: Tensor
    IO: Tensor
    S: Tensor


class IOIDataset(Dataset[Encoded]):
    """Prompts of the indirect object task (Wang et al. 2022), drawn from templates.

    `[A]` is the answer and `[B]` the name that is repeated; other placeholders are those of `nouns`.
    symmetric: every prompt also with its names exchanged. seed: None = the state that `random` is in.
    """

    def __init__(
        self,
        tokenizer: Any,
        templates: list[str] | None = None,
        names: list[str] | None = None,
        nouns: dict[str, list[str]] | None = None,
        num_samples: int = 1000,
        symmetric: bool = False,
        prepend_bos: bool = True,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.prepend_bos = prepend_bos
        if seed is not None:
            random.seed(seed)
        self.templates = self.get_default_templates() if templates is None else templates
        self.names = self.get_default_names() if names is None else names
        self.nouns = self.get_default_nouns() if nouns is None else nouns
        draws = num_samples // 2 if symmetric else num_samples
        self.samples = [sample for _ in range(draws) for sample in self.get_sample(symmetric=symmetric)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, idx: int) -> Encoded:
        sample = self.samples[idx]
        bos = [self.tokenizer.bos_token_id] * self.prepend_bos
        return {
            "prompt": torch.LongTensor(bos + self.tokenizer.encode(sample["text"])),
            "IO": torch.LongTensor(self.tokenizer.encode(sample["IO"])),
            "S": torch.LongTensor(self.tokenizer.encode(sample["S"])),
        }

    def get_sample(self, symmetric: bool = False) -> list[dict[str, str]]:
        """One draw: text, answer `IO` and repeated name `S`; two if symmetric."""
        template = random.choice(self.templates)
        for place, nouns in self.nouns.items():
            template = template.replace(f"[{place}]", random.choice(nouns))
        first, second = random.sample(self.names, 2)
        pairs = [(first, second), (second, first)][: 1 + symmetric]
        return [
            {"text": template.replace("[A]", a).replace("[B]", b), "IO": f" {a}", "S": f" {b}"}
            for a, b in pairs
        ]

    @staticmethod
    def get_default_names() -> list[str]:
        """Two names."""
        return ["John", "Mary"]

    @staticmethod
    def get_default_templates() -> list[str]:
        """Two templates of this package, after Wang et al. 2022, appendix A."""
        return [
            "When [A] and [B] came to the [LOCATION], [B] bought [OBJECT] for [A]",
            "Then, [B] and [A] went to the [LOCATION]. [B] gave some [OBJECT] to [A]",
        ]

    @staticmethod
    def get_default_nouns() -> dict[str, list[str]]:
        """Default values of the templates' placeholders."""
        return {"LOCATION": ["store", "market"], "OBJECT": ["milk", "eggs", "bread"]}


@torch.inference_mode()
def ioi_eval(
    model: Any,
    dataset: Dataset[Encoded] | None = None,
    batch_size: int = 8,
    num_samples: int = 1000,
    tokenizer: Any = None,
    symmetric: bool = False,
) -> dict[str, float]:
    """The mean of logit(answer) - logit(repeated name) where they first differ, and how often it is positive.

    Prompts end with the answer; they are padded on the right with id 0.
    """
    if dataset is None:
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        dataset = IOIDataset(tokenizer, num_samples=num_samples, symmetric=symmetric)
    found: list[float] = []
    for samples in tqdm(
        DataLoader(dataset, batch_size=batch_size, shuffle=True, collate_fn=list), delay=1, leave=False
    ):
        prompts = pad_sequence([sample["prompt"] for sample in samples], batch_first=True)
        logits = model(prompts, return_type="logits")
        found += [_difference(row, sample) for row, sample in zip(logits, samples, strict=True)]
    return {
        "Logit Difference": sum(found) / len(found),
        "Accuracy": sum(each > 0 for each in found) / len(found),
    }


def _difference(logits: Float[Tensor, "p v"], sample: Encoded) -> float:
    answer, other = sample["IO"], sample["S"]
    shared = min(len(answer), len(other))
    at = int((answer[:shared] != other[:shared]).nonzero()[0])
    here = logits[len(sample["prompt"]) - len(answer) + at - 1]
    return float(here[answer[at]] - here[other[at]])


def _refuser(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"{what} would be downloaded, which is not offered here; load it with the datasets library and give "
            "tokenize_and_concatenate's rows to evaluate_on_dataset"
        )

    refuse.__doc__ = f"Not offered ({what}): NotImplementedError naming the native way."
    return refuse


make_wiki_data_loader = _refuser("Wikitext")
make_owt_data_loader = _refuser("OpenWebText")
make_pile_data_loader = _refuser("the Pile")
make_code_data_loader = _refuser("CodeParrot")
make_mmlu_data_loader = _refuser("MMLU")
mmlu_eval = _refuser("MMLU")
evaluate = _refuser("Wikitext, OpenWebText, the Pile and CodeParrot")
