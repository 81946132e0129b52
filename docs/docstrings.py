"""Prepares the package's docstrings for the API reference: their plain text becomes the Markdown that is meant."""

import re

import griffe

OPENING = re.compile(r"^(Returns|Errors|Caveats?|Memory|Cost|Names|Source)\b:?")


class AsMarkdown(griffe.Extension):
    """Examples become code, parameters and the usual openings paragraphs of their own; asterisks stay asterisks."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite one docstring; called for every module, class, function and attribute."""
        if obj.docstring is None:
            return
        names = {p.name for p in obj.parameters} if isinstance(obj, griffe.Function) else set(obj.members)
        text, prompt, example = obj.docstring.value.replace("\nExample:\n    >>>", "\n>>>").partition("\n>>>")
        lines = [self.line(line, names) for line in text.splitlines()]
        if prompt:
            code = "\n".join(line.removeprefix("    ") for line in (">>>" + example).rstrip().splitlines())
            lines += ["", "```pycon", code, "```"]
        obj.docstring.value = "\n".join(lines)

    @staticmethod
    def line(line: str, names: set[str]) -> str:
        """One line of plain text, as Markdown."""
        if line.startswith("    ") or not line:
            return line
        pieces = line.split("`")
        line = "`".join(
            p if i % 2 else p.replace("*", r"\*").replace("<", "&lt;") for i, p in enumerate(pieces)
        )
        head, colon, rest = line.partition(":")
        if colon and names and set(re.split(r", ", head)) <= names:
            return "\n" + ", ".join(f"`{name}`" for name in head.split(", ")) + colon + rest
        opening = OPENING.match(line)
        return f"\n**{opening[0]}**{line[opening.end() :]}" if opening else line
