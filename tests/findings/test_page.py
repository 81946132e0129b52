"""The page about claims lists each of them with its region."""

from pathlib import Path

from interp.findings import CLAIMS

PAGE = Path(__file__).parents[2] / "docs" / "analyses" / "findings.md"


def test_the_page_lists_every_claim_with_what_the_record_says() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    listed = [line for line in lines if line.startswith("| `")]
    assert listed == [
        f"| `{name}` | {claim.text} | {claim.source} | {claim.region} {claim.unit} |"
        for name, claim in CLAIMS.items()
    ]
