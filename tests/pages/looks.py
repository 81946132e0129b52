"""What is wrong with a page as it stands in the browser: texts over each other, and what a reader cannot read or reach.

The second comes from axe (Deque Systems), a test suite of accessibility by other people.
"""

from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright import sync_api

WIDTHS = (420, 768, 1400, 2200)
SCHEMES = ("light", "dark")

OVERLAPS = """() => {
  // What of an element can be seen: what scrolling boxes around it cut off does not count; null = it moves by itself.
  const seen = new Map();
  const inSight = (element) => {
    if (!element || element === document.documentElement) return { left: -1e9, top: -1e9, right: 1e9, bottom: 1e9 };
    if (seen.has(element)) return seen.get(element);
    let box = inSight(element.parentElement);
    const style = getComputedStyle(element);
    if (["sticky", "fixed"].includes(style.position)) box = null;
    else if (box && (style.overflowX !== "visible" || style.overflowY !== "visible")) {
      const own = element.getBoundingClientRect();
      box = {
        left: Math.max(box.left, own.left), top: Math.max(box.top, own.top),
        right: Math.min(box.right, own.right), bottom: Math.min(box.bottom, own.bottom),
      };
    }
    seen.set(element, box);
    return box;
  };
  const lines = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(parent.tagName)) continue;
    if (!parent.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const box = inSight(parent);
    if (!box) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const own of range.getClientRects()) {
      const slack = 0.18 * own.height;  // a line is higher than its letters
      const [left, right] = [Math.max(own.left, box.left), Math.min(own.right, box.right)];
      const [top, bottom] = [Math.max(own.top + slack, box.top), Math.min(own.bottom - slack, box.bottom)];
      const text = node.data.trim().slice(0, 40);
      if (right - left > 1 && bottom - top > 1) lines.push({ left, right, top, bottom, parent, text });
    }
  }
  const bands = new Map(), clashes = new Set();
  lines.forEach((one, i) => {
    for (let y = Math.floor(one.top / 40); y <= Math.floor(one.bottom / 40); y++) {
      for (const other of (bands.get(y) ?? []).map((j) => lines[j])) {
        if (other.parent === one.parent) continue;
        const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
        const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
        const where = one.parent.closest("[id]")?.id;
        if (across > 2 && down > 1.5) clashes.add(`${one.text} over ${other.text} in ${where}`);
      }
      bands.set(y, [...(bands.get(y) ?? []), i]);
    }
  });
  return [...clashes];
}"""


def faults(page: "sync_api.Page") -> list[str]:
    """Texts that stand over each other, and axe's serious and critical findings; nothing for a page as it should be."""
    overlaps = page.evaluate(OVERLAPS)
    # In a world of its own, so that a page that allows no foreign script is looked at as it is.
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    session = page.context.new_cdp_session(page)
    frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
    world = session.send("Page.createIsolatedWorld", {"frameId": frame})["executionContextId"]
    session.send("Runtime.evaluate", {"expression": axe, "contextId": world})
    asked = {
        "expression": "axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => violations.map("
        "({ id, impact, nodes }) => ({ id, impact, nodes: nodes.map(({ html, any }) => [html, any[0]?.message]) })))",
        "contextId": world, "awaitPromise": True, "returnByValue": True,
    }  # fmt: skip
    answer = session.send("Runtime.evaluate", asked)
    assert "exceptionDetails" not in answer, answer["exceptionDetails"]
    found = [one for one in answer["result"]["value"] if one["impact"] in ("serious", "critical")]
    return [*overlaps, *(f"{one['id']}: {node}" for one in found for node in one["nodes"])]
