"""Shows the API reference what no parser sees: functions that are made of a question's record."""

import re

import griffe

PAIR = {"clean": "Prompts | Data", "corrupt": "Prompts | Data"}
DATA = {"data": "DataSource | Data | Pairs"}
MAKERS = {"of_data": DATA, "of_pairs": PAIR, "of_own_rows": DATA, "of_weights": {}}
"""What makes a function of a question's record (`interp.runs.functions`), and what it takes before the fields."""

GROUPED = re.compile(r"^    (\w+(?:, \w+)+): (\S.*\n(?:        .*(?:\n|$))*)", re.MULTILINE)


class QuestionFunctions(griffe.Extension):
    """`patch = of_pairs(Patch)` is shown as a function with the fields and the words of `Patch`."""

    def on_module(self, *, mod: griffe.Module, **_: object) -> None:
        """Put functions in the place of a module's attributes."""
        for name, each in list(mod.attributes.items()):
            if not each.is_alias and (made := function_of(each)) is not None:
                mod.members[name] = made
                for alias in list(each.aliases.values()):
                    alias.target = made

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Write what Google's parser reads: `Examples` for its code, and one entry for each of several arguments."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = GROUPED.sub(apart, text)


def apart(entry: re.Match[str]) -> str:
    """An entry about several arguments, once for each."""
    return "".join(f"    {name}: {entry[2]}" for name in entry[1].split(", "))


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
        made.docstring = griffe.Docstring(
            record.docstring.value,
            parent=made,
            parser="google",
            parser_options=record.docstring.parser_options,
        )
    return made


def fields_of(record: griffe.Class) -> list[tuple[str, griffe.Attribute]]:
    """The fields of a record in their order, those of its bases in the module first; `_` is where names begin."""
    bases = [record.parent.members.get(str(base)) for base in record.bases]
    inherited = [field for base in bases if isinstance(base, griffe.Class) for field in fields_of(base)]
    own = [(name, each) for name, each in record.members.items() if "instance-attribute" in each.labels]
    return inherited + [(name, each) for name, each in own if isinstance(each, griffe.Attribute)]
