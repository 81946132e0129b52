"""Prepares the package's docstrings for the API reference: their plain text becomes the Markdown that is meant."""

import re

import griffe

PAIR = {"clean": "Prompts | Data", "corrupt": "Prompts | Data"}
MAKERS = {"of_data": {"data": "DataSource | Data | Pairs"}, "of_pairs": PAIR, "of_weights": {}}
"""What makes a function of a question's record (`interp.runs.functions`), and what it takes before the fields."""
OPENING = re.compile(r"^(Returns|Errors|Caveats?|Memory|Cost|Names|Source)\b:?")


class AsMarkdown(griffe.Extension):
    """Examples become code, parameters and the usual openings paragraphs of their own; asterisks stay asterisks."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Rewrite one docstring; called for every object, a module before what is in it."""
        if isinstance(obj, griffe.Module):
            for name, each in list(obj.attributes.items()):
                if not each.is_alias and (made := function_of(each)) is not None:
                    obj.members[name] = made
                    for alias in list(each.aliases.values()):
                        alias.target = made
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


def function_of(attribute: griffe.Attribute) -> griffe.Function | None:
    """The function that `patch = of_pairs(Patch)` makes, with the fields and words of its record; else None."""
    call = attribute.value
    if not isinstance(call, griffe.ExprCall) or str(call.function) not in MAKERS:
        return None
    record = attribute.parent.members[str(call.arguments[0])]
    kind = griffe.ParameterKind.positional_or_keyword
    leading = {"model": "Model", **MAKERS[str(call.function)]}
    parameters = [griffe.Parameter(name, annotation=hint, kind=kind) for name, hint in leading.items()]
    for name, field in fields_of(record):
        if name == "_":
            kind = griffe.ParameterKind.keyword_only
        else:
            parameters.append(
                griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value)
            )
    made = griffe.Function(
        attribute.name, parameters=griffe.Parameters(*parameters), returns="xr.Dataset", lineno=attribute.lineno,
        endlineno=attribute.endlineno, parent=attribute.parent,
    )  # fmt: skip
    if record.docstring is not None:
        made.docstring = griffe.Docstring(record.docstring.value, parent=made)
    return made


def fields_of(record: griffe.Class) -> list[tuple[str, griffe.Attribute]]:
    """The fields of a record in their order, those of its bases in the module first; `_` is where names begin."""
    bases = [record.parent.members.get(str(base)) for base in record.bases]
    inherited = [field for base in bases if isinstance(base, griffe.Class) for field in fields_of(base)]
    own = [(name, each) for name, each in record.members.items() if "instance-attribute" in each.labels]
    return inherited + [(name, each) for name, each in own if isinstance(each, griffe.Attribute)]
