"""The commands about one model: its pages, the demo models, the numerical contract."""

import webbrowser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from interp.cli.opening import ModelCommand, Printing

if TYPE_CHECKING:
    from interp.hooked import HookedTransformer
    from interp.pages import ReportQuestion

PROMPT = "When Mary and John went to the store, John gave a drink to"
"""The default prompt of a report: an indirect object, with the repeated name as wrong answer."""
ANSWER, WRONG = " Mary", " John"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
"""The default corrupted prompt, with the wrong answer as its answer: the other person gives."""
NEEDED = ("starlette", "uvicorn", "pydantic")
"""Packages that the live page requires."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand(ModelCommand, Printing):
    """Say what was found for one prompt and write its page: HTML that opens from disk, all tables, run.json."""

    prompt: str | None = None
    """Text to analyse, or the JSON file of a chat; without it an indirect-object sentence."""
    answer: str | None = None
    """Next token to ask about, leading space included; without it the model's own most probable one."""
    wrong: str | None = None
    """Token the answer is contrasted with."""
    out: Path = Path("report")
    """Folder to write; an earlier report in it is replaced, anything else is refused."""
    seed: int = 0
    """Seed of the random tokens on which heads are scored."""
    corrupt: str | None = None
    """The prompt once more, token for token, but for what changes its answer: what patching compares it with."""
    chat: bool = False
    """The prompts are what a user says: put them into the model's chat template."""
    csv: bool = False
    """Write every table as CSV too, beside Parquet."""

    def run(self) -> None:
        """Load the model, write the report and print its findings; the output folder is checked before any work."""
        question = self.question()
        from interp import DEMOS, zoo
        from interp.pages import About, findings, replacing, report_of, write_report

        about = About(self.model)
        if self.model in DEMOS:
            about = About(self.model, DEMOS[self.model].summary, zoo.card(self.model))
        with replacing(self.out) as folder:
            model = self.opened()
            question = self.as_conversation(model, question)
            report = report_of(model, question, about, seed=self.seed)
            write_report(report, folder, csv=self.csv)
        found, page = findings(report), self.out / "index.html"
        self.tell(
            [*(f"- {sentence}" for sentence in found), str(page)],
            lambda: {"findings": [{"words": one.words, "doubt": one.doubt} for one in found], "page": page},
        )

    def question(self) -> "ReportQuestion":
        """The question of the options: the given prompt and answers, or without any of them the built-in ones."""
        from interp.pages import ReportQuestion

        if self.prompt is not None:
            return ReportQuestion(self.prompt, self.answer, self.wrong, self.corrupt)
        if self.answer is not None or self.wrong is not None:
            raise ValueError("an answer requires a prompt of your own (--prompt), got none")
        if self.corrupt is not None:
            raise ValueError(
                "a corrupted prompt (--corrupt) requires a prompt of your own (--prompt), got none"
            )
        return ReportQuestion(PROMPT, ANSWER, WRONG, CORRUPT)

    def as_conversation(self, model: "HookedTransformer", question: "ReportQuestion") -> "ReportQuestion":
        """The question with chats of files, and with `--chat` user messages, in the model's chat template."""
        from interp.pages import ReportQuestion

        given = [
            None if text is None else chat_of(text, self.chat) for text in (question.prompt, question.corrupt)
        ]
        if not any(isinstance(each, list) for each in given):
            return question
        prompt, corrupt = given
        assert prompt is not None
        return ReportQuestion.of(model.text, prompt, question.answer, question.wrong, corrupt)


def chat_of(text: str, is_user: bool = False) -> "str | list[dict[str, str]]":
    """The chat in the JSON file that a prompt names, a user's message, or the prompt itself.

    Raises:
        ValueError: a file of several chats, a file of texts, or the name of one that is not there.
    """
    from interp.cli.given import reads_like_a_file
    from interp.core.files import is_file
    from interp.data import read_chats

    if text.endswith((".json", ".jsonl")) and is_file(text):
        chats = read_chats(text)
        if len(chats) != 1:
            raise ValueError(f"a file of one chat is required, {text} has {len(chats)}")
        return chats[0]
    if reads_like_a_file(text):
        why = "holds texts" if is_file(text) else "is not there"
        raise ValueError(f"a prompt or a file of one chat (.json, .jsonl) is required, the file {text} {why}")
    return [{"role": "user", "content": text}] if is_user else text


def chat_text(model: "HookedTransformer", text: str) -> str:
    """A prompt as the live page shows it: of a chat's file the text in the model's chat template.

    Raises:
        ValueError: a template whose text is other tokens where it is typed, since texts begin with BOS.
    """
    chat = chat_of(text)
    if isinstance(chat, str):
        return chat
    ids = model.to_batch(chat=chat).tokens[0]
    written = model.to_string(ids)
    if model.text.batch(written).tokens.tolist() != [ids.tolist()]:
        raise ValueError(
            "the live page takes texts, and the text of this chat is other tokens than the chat, whose template writes "
            "no BOS: interp report --prompt takes it"
        )
    return written


@dataclass(frozen=True)
class Graph(Printing):
    """Draw an attribution graph, of Neuronpedia, circuit-tracer or a report of ours, as a page that opens from disk."""

    file: Annotated[Path, tyro.conf.Positional]
    """The graph's JSON file."""
    out: Path = Path("graph.html")
    """The page to write."""
    nodes: int = 60
    """How many nodes to draw at first, those of most influence."""

    def run(self) -> None:
        """Read, draw, write."""
        from interp.circuits import read_attribution_graph
        from interp.core.files import check_replaceable, write_atomically
        from interp.pages import graph_page

        self.require_some("nodes")
        check_replaceable(self.out)
        text = graph_page(read_attribution_graph(self.file), most=self.nodes)
        write_atomically(self.out, lambda path: path.write_text(text, encoding="utf-8"))
        self.tell([str(self.out)], lambda: {"page": self.out})


@dataclass(frozen=True)
class Models(Printing):
    """List the demo models and what they measurably do."""

    def run(self) -> None:
        """Print one paragraph per model."""
        from interp.zoo.demos import DEMOS, card_of

        cards = {name: {"summary": demo.summary, **card_of(name)} for name, demo in DEMOS.items()}
        self.tell(
            (line for name, card in cards.items() for line in _card_lines(name, card)),
            lambda: {
                name: {key: card.get(key) for key in ("summary", "measured")} for name, card in cards.items()
            },
        )


def _card_lines(name: str, card: Mapping[str, object]) -> Iterator[str]:
    """The paragraph of one demo model."""
    yield f"{name}\n    {card['summary']}"
    measured = card.get("measured")
    for number, entry in measured.items() if isinstance(measured, dict) else ():
        head = f" (head {entry['head']})" if "head" in entry else ""
        yield f"    {number.replace('_', ' '):<36} {entry['value']:>7.3f}  n = {entry['n']}{head}"


@dataclass(frozen=True, kw_only=True)
class Verify(ModelCommand, Printing):
    """Measure the numerical contract of a model: every line with its error; exit code 1 if one does not hold."""

    def run(self) -> int:
        """Load, measure, print; 1 if the contract is broken."""
        from interp import DEMOS, HookedEncoderDecoder, HookedTransformer
        from interp.families import is_encoder_decoder
        from interp.families.hub import located

        source: str | Path = self.model
        pair = False
        if self.model not in DEMOS:
            source = located(self.model, self.revision, f"demo models: {', '.join(DEMOS)}")
            pair = is_encoder_decoder(source)
        kind = HookedEncoderDecoder if pair else HookedTransformer
        revision = self.revision if self.model in DEMOS else None
        model = kind.from_pretrained(source, revision=revision, dtype=self.dtype, device=self.available())
        report = model.verify()
        lines = [{**vars(line), "passed": line.passed} for line in report.lines]
        self.tell([str(report)], lambda: {"model": report.model, "passed": report.passed, "lines": lines})
        return 0 if report.passed else 1


@dataclass(frozen=True, kw_only=True)
class Serve(ModelCommand):
    """Serve the live page of a model on this machine: type, edit by a click, and watch. Ctrl-C ends it."""

    prompt: str = PROMPT
    """Text that the page begins with, or the JSON file of a chat."""
    second: str | None = None
    """Text or chat that patches come from, to begin with; without it and `--prompt` the built-in corrupted prompt."""
    answer: str | None = None
    """What comes next and has its logits split up, one token or several, leading space included; without it the most
    probable token.
    """
    wrong: str | None = None
    """What it is contrasted with, at the first token in which the two differ."""
    direction: tuple[Path, ...] = ()
    """Files of directions, as `Subspace.save` writes them: each gets a slider that adds it to the stream."""
    port: int = 0
    """Port of 127.0.0.1; 0 takes a free one."""
    open: bool = False
    """Open the page in the browser."""

    def run(self) -> None:
        """Load the model, print the address, and answer until Ctrl-C."""
        if missing := [name for name in NEEDED if find_spec(name) is None]:
            raise ValueError(f"interp serve requires {', '.join(missing)}: pip install {' '.join(missing)}")
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port requires a number from 0 to 65535, got {self.port}")
        from interp.causal import Subspace
        from interp.serve.app import ServedModel, serve
        from interp.serve.document import Opening
        from interp.serve.session import Session
        from interp.serve.snippet import Origin

        usual = self.prompt == PROMPT
        answers = (
            (ANSWER, WRONG)
            if usual and self.answer is None and self.wrong is None
            else (self.answer, self.wrong)
        )
        model = self.opened()
        second = self.second or (CORRUPT if usual else "")
        chats = [chat_of(text) for text in (self.prompt, second)]
        begins = Opening(
            chat_text(model, self.prompt), chat_text(model, second), *(text or "" for text in answers)
        )
        subspaces = [Subspace.load(file, model) for file in self.direction]
        files = {subspace.site: str(file) for subspace, file in zip(subspaces, self.direction, strict=True)}
        subject = ServedModel(
            Session(
                model, subspaces, [model.to_batch(chat=chat) for chat in chats if isinstance(chat, list)]
            ),
            Origin(self.model, self.device, self.revision, self.dtype, files, self.prepend_bos),
            begins,
        )
        serve(subject, self.port, self._ready)

    def _ready(self, address: str) -> None:
        print(
            f"{address}\nOnly this machine can open it, and only with this address. Ctrl-C ends it.",
            flush=True,
        )
        if self.open:
            webbrowser.open(address)
