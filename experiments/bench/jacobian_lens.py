"""Claim: a Jacobian lens takes at most 1.05x the time of one backward pass for each row.

One prompt of 128 and one of 24 tokens, a GPT-2 of 6 layers and width 384, all rows of J of 5 layers (3 layers, width
192 and 64 tokens at the narrow shape). "One by one": the same with one row at a time, the naive loop. "Together":
`is_grads_batched`, 16 rows at a time on a single copy. Then the whole fit of the longer prompt against TransformerLens
4's, on the same weights and tokens.
"""

import torch
import transformers
import tyro
from measure import NARROW, Calls, cpu_seconds, memory, report, timing
from subjects import largest_difference

import interp
from interp import Read
from interp.lenses.jacobian_lens import prompt_jacobian
from interp.model import Transformer
from interp.model.sites import stream_after
from interp.model.tap import Tap
from interp.zoo.demos import WEIGHTS

LAYERS, WIDTH, LENGTH = (3, 192, 64) if NARROW else (6, 384, 128)
SKIP, CLAIM = 16, 1.05


def main(repeats: int = 3) -> None:
    """Measure the rows of one prompt's Jacobian.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=1024,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=6,
        bos_token_id=None,
        eos_token_id=None,
    )
    network = transformers.GPT2LMHeadModel(config).eval()
    model = interp.HookedTransformer.from_pretrained(network).transformer
    for length in (LENGTH, 24):
        calls = systems(model, torch.randint(1024, (1, length)))
        first, *others = (call() for call in calls.values())
        assert isinstance(first, torch.Tensor)
        assert all(isinstance(x, torch.Tensor) and largest_difference(x, first) < 1e-4 for x in others[:2])
        measured(
            calls,
            repeats,
            f"J of {LAYERS - 1} layers, {length} tokens, width {WIDTH}",
            "one by one",
            claim=CLAIM,
        )
    beside_transformer_lens(network, repeats)


def beside_transformer_lens(model: transformers.GPT2LMHeadModel, repeats: int) -> None:
    """Both fits of one prompt, and how far they stand apart; the bridge takes over the Hugging Face model."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis.jacobian_lens import JacobianLens

    ours, prompt = (
        interp.HookedTransformer.from_pretrained(model),
        "The cat sat on the mat and said so. " * 20,
    )
    file = WEIGHTS / "demo-4l" / "tokenizer.json"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|bos|>")
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=tokenizer, device="cpu")
    tokens = bridge.to_tokens(prompt)[:, :LENGTH]
    calls: Calls = {
        "TransformerLens": lambda: (
            JacobianLens.fit(bridge, [prompt], corpus="cat", show_progress=False).jacobians
        ),
        "interp": lambda: interp.lenses.jacobian_lens(ours, tokens).jacobian,
    }
    theirs, mine = (call() for call in calls.values())
    assert isinstance(theirs, dict) and isinstance(mine, torch.Tensor)
    apart = largest_difference(mine, torch.stack([theirs[layer] for layer in range(LAYERS - 1)]))
    what = f"the fit of one prompt of {LENGTH} tokens"
    measured(calls, repeats, what, "TransformerLens", largest_difference=apart)


def measured(calls: Calls, repeats: int, what: str, reference: str, **more: float) -> None:
    """Report the times of every system beside the reference's, then its memory."""
    seconds = cpu_seconds(calls, repeats)
    for system, call in calls.items():
        report("jacobian_lens", system, what, timing(seconds, system, reference), memory(call), **more)


def systems(model: Transformer, tokens: torch.Tensor) -> Calls:
    """The same rows three ways, and ten of them."""
    text, layers, rows = interp.Batch(tokens), range(LAYERS - 1), torch.eye(WIDTH)

    def one_by_one() -> torch.Tensor:
        return together(model, tokens, rows, 1)

    return {
        "one by one": one_by_one,
        "interp": lambda: prompt_jacobian(model, text, layers, rows, SKIP),
        "together": lambda: together(model, tokens, rows, 16),
        "interp, 10 rows": lambda: prompt_jacobian(model, text, layers, rows[:10], SKIP),
    }


def together(model: Transformer, tokens: torch.Tensor, rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of J from one copy of the prompt, some vector-Jacobian products at a time."""
    reads = [Read(stream_after(model.config, layer), grad=True) for layer in range(LAYERS - 1)]
    tap, counted, found = Tap(reads), slice(SKIP, tokens.shape[1] - 1), []
    final = model(tokens, tap, stop=LAYERS)
    sources = [tap.live[read] for read in reads]
    for piece in rows.split(size):
        towards = torch.zeros(len(piece), *final.shape)
        towards[:, 0, counted] = piece[:, None]
        how = {"is_grads_batched": True} if size > 1 else {}
        given = towards if size > 1 else towards[0]
        grads = torch.autograd.grad(final, sources, given, retain_graph=True, **how)
        each = [grad.view(len(piece), *final.shape)[:, 0, counted].mean(1) for grad in grads]
        found.append(torch.stack(each))
    tap.close()
    return torch.cat(found, 1)


if __name__ == "__main__":
    tyro.cli(main)
