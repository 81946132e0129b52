"""Words of a command line that read like the name of a file which is not there."""

import pytest

from interp.cli.asking import read_data


@pytest.mark.parametrize("text", ["nofile.txt", "facts.csv", "out/talk.json", "shards.jsonl"])
def test_a_file_that_is_not_there_is_no_prompt(text: str) -> None:
    with pytest.raises(ValueError, match=f"there is no file {text}"):
        read_data((text,))


@pytest.mark.parametrize("text", ["Open nofile.txt", "Mary.", "a.b", "3.5", "txt"])
def test_other_words_are_prompts(text: str) -> None:
    assert read_data((text,)) == text
