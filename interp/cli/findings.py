"""The command that asks a model what the field reports of models."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.cli.opening import ModelCommand, Printing

if TYPE_CHECKING:
    from interp.findings.claim import Claim
    from interp.findings.table import Row


@dataclass(frozen=True, kw_only=True)
class FindingsCommand(ModelCommand, Printing):
    """Ask a decoder what the field reports of language models, and print each claim's number, null and verdict."""

    model: Annotated[str, tyro.conf.Positional] = "demo-4l"
    """Demo name (see `interp models`), local folder, file of weights or hub name."""
    claims: tuple[str, ...] = ()
    """Names of claims; without it all, which takes minutes."""
    prompts: int = 102
    """Rows of each claim, a third with each of three seeds."""
    texts: Path | None = None
    """File of ordinary prose, a paragraph a line; without it paragraphs of a novel."""
    only: Literal["ask", "list"] = "ask"
    """"list" prints the claims with their regions, and opens no model."""
    out: Path | None = None
    """CSV file to write the whole table to."""

    def run(self) -> None:
        """Print the claims one by one, each as soon as it is measured."""
        from interp.cli.as_json import result_of
        from interp.core.files import check_replaceable, text_contents, write_atomically
        from interp.core.results import frame
        from interp.findings.table import CLAIMS, as_result, check_names, rows, setting_of

        names = list(self.claims) or list(CLAIMS)
        check_names(names)
        if self.only == "list":
            claims = {name: CLAIMS[name] for name in names}
            self.tell(
                (line for name, claim in claims.items() for line in _claim_lines(name, claim)),
                lambda: [{"claim": name, **_about(claim)} for name, claim in claims.items()],
            )
            return
        if self.out is not None:
            check_replaceable(self.out)
        texts = None
        if self.texts is not None:
            texts = [line for line in text_contents(self.texts).splitlines() if line.strip()]
        setting = setting_of(self.opened(), names, self.prompts, texts)
        found = []
        for row in rows(setting, names):
            found.append(row)
            if not self.json:
                print("\n".join(_lines(row)), flush=True)
        result = as_result(found, setting.model)
        counts = result.verdict.to_series().value_counts()
        self.tell(
            [", ".join(f"{count} {verdict}" for verdict, count in counts.items())],
            lambda: {**result_of(result), "verdicts": counts.to_dict()},
        )
        if self.out is not None:
            table = frame(result)
            write_atomically(self.out, lambda path: table.to_csv(path, index=False))
            self.wrote(self.out)


def _claim_lines(name: str, claim: "Claim") -> Iterator[str]:
    """A claim and the region that its number must lie in."""
    yield f"{name}: {claim.text} [{claim.source}]"
    yield f"    {claim.measured}, minus {claim.null}: {claim.region} {claim.unit}"


def _about(claim: "Claim") -> dict[str, object]:
    """A claim without the function that measures it."""
    return {name: getattr(claim, name) for name in ("text", "source", "measured", "null", "unit", "region")}


def _lines(row: "Row") -> list[str]:
    """A claim, and what came of it."""
    from interp.views.writing import short

    claim, seen = row.claim, row.measured
    head = f"{row.verdict.upper():<15} {row.name}: {claim.text}"
    if seen is None:
        return [head, f"    {shorten(row.why, 200)}"]
    about = f"; {seen.about}" if seen.about else ""
    ends = f"{short(seen.value)} [{short(seen.low)}, {short(seen.high)}]"
    return [
        head,
        f"    {claim.measured}, above {claim.null} ({short(seen.null)}): {ends} {claim.unit}, {claim.region} is asked",
        f"    n = {seen.n} {seen.over}{about}; {row.seconds:.0f} s. {claim.source}",
    ]
