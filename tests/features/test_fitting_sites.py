"""Which site a dictionary fits: a planted one is known by what it explains there, worked out site by site."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer, Note, Read
from interp.features import Dictionary, ReLU, fitting_sites, load, save
from interp.model.norm import Normalize
from interp.passes import observe
from tests.configs import build

ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1, 8], [5, 11, 8, 3, 2, 2, 9], [4, 6, 13, 21, 17]]
OWN, NORM, MLP = "blocks.1.hook_resid_post", "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"


def model(name: str = "llama-gqa") -> HookedTransformer:
    subject = HookedTransformer(copy.deepcopy(build(name)).to(torch.float64))
    for module in subject.transformer.modules():
        if isinstance(module, Normalize) and module.weight is not None:
            torch.nn.init.normal_(module.weight, 1.0, 0.5, generator=torch.Generator().manual_seed(1))
    return subject


def values(subject: HookedTransformer, site: str) -> Tensor:
    """The vectors of a site at every token of the rows, in order."""
    found = [
        observe(subject.transformer, subject.to_batch([ids]), [Read(site)]).trace[Read(site)][0]
        for ids in ROWS
    ]
    return torch.cat(found).flatten(1)


def planted(x: Tensor, y: Tensor, k: int, **where: object) -> Dictionary:
    """The best map of rank k from x to y, each direction as two features of opposite sign."""
    mean, inputs = y.mean(0), torch.cat((x, torch.ones(len(x), 1).double()), 1)
    directions = torch.linalg.svd(y - mean, full_matrices=False).Vh[:k]
    encoder = torch.linalg.lstsq(inputs, (y - mean) @ directions.T, driver="gelsd").solution
    weights = {
        "W_enc": torch.cat((encoder[:-1], -encoder[:-1]), 1), "b_enc": torch.cat((encoder[-1], -encoder[-1])),
        "W_dec": torch.cat((directions, -directions)), "b_dec": mean,
    }  # fmt: skip
    return Dictionary(ReLU(), weights, apply_b_dec_to_input=False, **where)  # type: ignore[arg-type]


def explained(coder: Dictionary, x: Tensor, y: Tensor) -> float:
    return float(1 - (y - coder(x)).square().sum() / (y - y.mean(0)).square().sum())


def test_every_site_near_has_the_numbers_of_a_dictionary_read_there() -> None:
    subject = model()
    sae = planted(values(subject, OWN), values(subject, OWN), 6, reads=OWN)
    found = fitting_sites(subject, ROWS, sae, skip_bos=False)
    assert found.site.values[0] == OWN and found.named.values.tolist() == [True] + [False] * (
        found.sizes["site"] - 1
    )
    for site in map(str, found.site.values):
        if "before" in site:
            continue
        x = values(subject, site)
        got = found.value.sel(site=site)
        assert float(got.sel(score="explained_variance")) == pytest.approx(explained(sae, x, x), rel=1e-9), (
            site
        )
        l0 = float((sae.encode(x) != 0).double().sum(1).mean())
        assert float(got.sel(score="l0")) == pytest.approx(l0, rel=1e-12)
    layers = {site.split(".")[1] for site in map(str, found.site.values)}
    assert layers == {"0", "1"} or layers == {"0", "1", "2"}
    assert found.value.sel(score="explained_variance").values.tolist() == sorted(
        found.value.sel(score="explained_variance").values.tolist(), reverse=True
    )


@pytest.mark.parametrize("named", [NORM, "blocks.1.hook_resid_mid"])
def test_a_wrong_name_is_told_with_the_site_that_fits(named: str) -> None:
    """Of a transcoder that was made for the norm's output before its gain."""
    subject = model()
    norm = subject.transformer.get_submodule("blocks.1.ln2")
    assert isinstance(norm, Normalize) and norm.gamma is not None
    bare, y = values(subject, NORM) / norm.gamma.detach(), values(subject, MLP)
    coder = planted(bare, y, 12)
    right = Dictionary(coder.kind, dict(coder.named_parameters()), reads=NORM, writes=MLP, before_gain=True)
    found = fitting_sites(subject, ROWS, right, skip_bos=False)
    assert str(found.site.values[0]) == f"{NORM} before its gain" and "notes" not in found.attrs
    best = found.value.sel(score="explained_variance")[0]
    assert float(best) == pytest.approx(explained(coder, bare, y), rel=1e-9)
    wrong = Dictionary(coder.kind, dict(coder.named_parameters()), reads=named, writes=MLP)
    with pytest.warns(Note, match=f"names {named}, where it leaves .* before its gain it leaves"):
        found = fitting_sites(subject, ROWS, wrong, skip_bos=False)
    assert str(found.site.values[0]) == f"{NORM} before its gain"


def test_a_dictionary_that_is_loaded_with_a_model_and_data_is_looked_at(tmp_path: Path) -> None:
    subject = model()
    x = values(subject, MLP)
    sae = planted(x, x, 6, reads=OWN, metadata={"hook_name": OWN})
    save(sae, tmp_path)
    with pytest.warns(Note, match=f"names {OWN}, where .* at {MLP} it leaves"):
        load(tmp_path, model=subject, data=ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(tmp_path, model=subject).reads == OWN
    with pytest.raises(ValueError, match="data requires the model"):
        load(tmp_path, data=ROWS)


def test_a_dictionary_that_explains_nothing_anywhere_is_pointed_out() -> None:
    subject = model()
    x = values(subject, OWN)
    sae = planted(x, x, 6, reads=OWN)
    weights = {name: 100 * weight for name, weight in sae.named_parameters()}
    with pytest.warns(Note, match="explains nothing at any of the .* made for another model"):
        fitting_sites(subject, ROWS, Dictionary(ReLU(), weights, reads=OWN))


def test_a_dictionary_without_a_site_is_refused() -> None:
    subject = model()
    x = values(subject, MLP)
    with pytest.raises(ValueError, match="does not know its site"):
        fitting_sites(subject, ROWS, planted(x, x, 3))


def test_a_dictionary_of_the_embeddings_is_tried_outside_the_blocks() -> None:
    subject = model("gpt2")
    x = values(subject, "hook_embed")
    found = fitting_sites(subject, ROWS, planted(x, x, 6, reads="hook_embed"), skip_bos=False)
    assert str(found.site.values[0]) == "hook_embed" and "hook_pos_embed" in found.site.values
    assert interp.features.fitting_sites is fitting_sites
