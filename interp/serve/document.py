"""The HTML page: a template with the model's shape, and style and script joined from assets."""

from dataclasses import asdict, dataclass

from interp.core.visible import harmless
from interp.model.parts import Part
from interp.pages.report import About
from interp.pages.stages import STEPS_IN_WORDS as STEPS
from interp.pages.templates import environment, joined, own
from interp.pages.views import SCORES
from interp.serve import asks
from interp.serve.directions import RANDOM
from interp.serve.session import Session
from interp.views.writing import count

SERVE = "interp.serve"
SHARED = ("state", "stages", "keyboard")
"""Scripts of the report page that this one uses; then its own."""
SCRIPTS = ("talk", "history", "tables", "patterns", "controls", "steering", "begin")


@dataclass(frozen=True)
class Opening:
    """The prompt and edits that the page begins with; empty: nothing."""

    prompt: str
    second: str = ""
    answer: str = ""
    wrong: str = ""


def page(session: Session, source: str, opening: Opening) -> str:
    """The page as HTML."""
    config = session.config
    shape = {
        "names": [],
        "layers": config.n_layers,
        "heads": config.n_heads,
        "mlp": config.mlp is not None,
        "neurons": session.neurons,
        "most_edits": asks.MAX_EDITS,
        "directions": _directions(session),
    }
    return environment(SERVE).get_template("serve.html").render(
        source=harmless(About(source).title), config=config, shape=shape, limits=asks, facts=_facts(session),
        random=RANDOM, scores=SCORES, steps=STEPS, **asdict(opening),
    )  # fmt: skip


def style() -> str:
    """The report page's style, then the live page's."""
    return own("report.css") + own("serve.css", SERVE)


def code() -> str:
    """All scripts as one function."""
    parts = [*(own(f"{name}.js") for name in SHARED), *(own(f"{name}.js", SERVE) for name in SCRIPTS)]
    return joined(parts)


def _directions(session: Session) -> list[dict[str, object]]:
    """The directions that the page may add: the site as it writes it, and how long each is."""
    return [
        {"where": str(Part.of(site)), "length": round(float(each.double().norm()), 2)}
        for site, each in session.directions.items()
    ]


def _facts(session: Session) -> list[tuple[str, str]]:
    """The model in numbers."""
    config = session.config
    return [
        ("layers", str(config.n_layers)),
        ("heads a layer", str(config.n_heads)),
        ("d_model", count(config.d_model)),
        ("neurons a layer", count(session.neurons) if session.neurons else "none"),
        ("vocabulary", f"{count(config.d_vocab)} tokens"),
        ("dtype", str(session.model.transformer.dtype).removeprefix("torch.")),
    ]
