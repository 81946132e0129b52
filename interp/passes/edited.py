"""Which edits of a model act at which sites: needed by computations from weights, which run no pass with edits."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import COLUMNS, POSITIONS, Detach, Edit, Project, Scale, Zero
from interp.model.layout import NEW, ByRole, PositionError
from interp.model.sites import BLOCK_SITES, axes_of, block_rows, find
from interp.model.tap import Read
from interp.model.transformer import Transformer

STREAM = (
    "hook_resid_pre", "hook_resid_pre_attn", "hook_resid_mid", "hook_resid_mid_cross", "hook_resid_post",
    "hook_normalized_resid_post",
)  # fmt: skip
"""The sites of a block that hold the whole residual stream."""


def after_pattern(config: ModelConfig, layer: int) -> tuple[str, ...]:
    """The sites of a block from what follows attention's pattern and values to what it adds to the stream."""
    place = {site.name: i for i, site in enumerate(BLOCK_SITES)}
    first, last = place["attn.hook_pattern"], place["hook_attn_out"]
    rows = block_rows(config.at_layer(layer))  # a row that a mixer brings stands before a usual one
    return tuple(row.name for row in rows if first < place.get(row.name, place.get(row.before, -1)) <= last)


def layer_of(edit: Edit, model: Transformer) -> int | None:
    """The block that an edit acts in; None outside the blocks."""
    return find(edit.site, model.config)[1]


def inner_site(edit: Edit) -> str:
    """The site of an edit without its block: `attn.hook_z`."""
    return edit.site.split(".", 2)[2] if edit.site.startswith("blocks.") else edit.site


def edits_at(model: Transformer, layer: int, names: Iterable[str]) -> list[Edit]:
    """The edits of a model at these sites of one block, in their order."""
    site_names = {f"blocks.{layer}.{name}" for name in names}
    return [edit for edit in model.edits if edit.site in site_names]


def of_columns(model: Transformer) -> list[Edit]:
    """The edits of a model that may treat columns of a batch differently, so that realigned rows give other results.

    These are edits with values for each column, and functions. An edit at a position follows its token.
    """
    return [edit for edit in model.edits if not _treats_columns_alike(edit)]


def _treats_columns_alike(edit: Edit) -> bool:
    """Whether an edit surely acts on a token in the same way in every column."""
    if isinstance(edit.change, Zero | Scale | Project | Detach):
        return True
    ndim, axes = getattr(getattr(edit.change, "values", None), "ndim", 0), len(axes_of(edit.site).split())
    return edit.planned and (ndim <= 1 or (names_tokens(edit) and ndim < axes))


def check_tokens(model: Transformer, batch: Batch) -> None:
    """PositionError, naming the prompt, if a row lacks a position at which the model is edited."""
    for edit in filter(names_tokens, model.edits):
        columns = [edit.cells[axis] for axis in (*COLUMNS, "k") if axis in edit.cells]
        try:
            for pos in columns:
                if pos != NEW:
                    batch.tokens_at(pos)
        except PositionError as cause:
            raise PositionError(f"the edit of {edit.name}: {cause}") from cause


def in_batch(edits: Sequence[Edit], batch: Batch) -> list[Edit]:
    """The edits with the positions of each row in the place of roles of its chat (`{"role": "user"}`)."""
    return [_in_batch(edit, batch) for edit in edits]


def _in_batch(edit: Edit, batch: Batch) -> Edit:
    roles = {dim: index for dim, index in edit.at.items() if isinstance(index, ByRole)}
    if not roles:
        return edit
    try:
        places = {dim: batch.positions_of(by, edit.rows) for dim, by in roles.items()}
    except ValueError as cause:
        raise ValueError(f"the edit of {edit.name}: {cause}") from cause
    return replace(edit, at={**edit.at, **places})


def with_edits_in_batch(
    model: Transformer, batch: Batch, edits: Sequence[Edit] = ()
) -> tuple[Transformer, list[Edit]]:
    """The model and the edits of one pass over a batch, with positions in the place of roles of its chats.

    A model whose own edits name roles is returned without them, and they stand before those of the pass.
    """
    of_pass = in_batch(edits, batch)
    if not any(isinstance(index, ByRole) for edit in model.edits for index in edit.at.values()):
        return model, of_pass
    return model.unedited, [*in_batch(model.edits, batch), *of_pass]


def read_in_batch(read: Read, batch: Batch) -> Read:
    """The read with the positions of each row in the place of a role of its chat."""
    return replace(read, pos=batch.positions_of(read.pos)) if isinstance(read.pos, ByRole) else read


def names_tokens(edit: Edit) -> bool:
    """Whether an edit acts at some positions only."""
    return not set(edit.cells).isdisjoint(POSITIONS)
