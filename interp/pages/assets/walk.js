// --- the walk through what was found: one finding after the other, with the cells it speaks of marked and in sight ----

const drawWalk = () => {
  const [bar, startAt] = [one("#walk"), one("#walk-start")];
  const sentences = all(".findings li");
  let at = 0;

  // A switch that hides the element is set to what shows it.
  const bringUp = (element) => {
    for (let box = element; box; box = box.parentElement) {
      const folded = box.matches(".folded") && box.hidden && one("input[name=depths][value=all]");
      const hides = box.hidden && Object.entries(box.dataset).map(([name, value]) => one(`input[name="${name}"][value="${value}"]`)).find(Boolean);
      (folded || hides || null)?.click();
    }
  };
  const unmarked = () => {
    all(".spoken").forEach((element) => element.classList.remove("spoken"));
    for (const canvas of all("canvas[data-spoken]")) {
      delete canvas.dataset.spoken;
      canvas.dispatchEvent(new Event("spoken"));
    }
  };
  // The element to look at: the cell of a table, or the whole picture that it is painted in.
  const marked = ([view, row, column]) => {
    const map = one(`[data-view="${view}"]`);
    if (!map) return null;
    bringUp(map);
    if (map.matches("canvas")) {
      map.dataset.spoken = `${map.dataset.spoken ?? ""} ${row},${column}`.trim();
      map.dispatchEvent(new Event("spoken"));
      return map;
    }
    const cell = map.tBodies[0].rows[row].cells[column + 1];
    bringUp(cell);
    cell.classList.add("spoken");
    return cell;
  };
  // What the other views show beside it: the head or the token of the first place.
  const chosen = ([view, row, column]) => {
    if (/^(attribution|ablation|attention|patching \w+ z)/.test(view)) {
      if (column < data.heads) select({ layer: row, head: column, part: headName(row, column) });
    } else select({ pos: column, cell: null });
  };

  const show = (to) => {
    at = Math.max(0, Math.min(sentences.length - 1, to));
    const { section, places } = data.findings[at];
    unmarked();
    const seen = places.map(marked).filter(Boolean);
    if (places.length) chosen(places[0]);
    sentences[at].classList.add("spoken");
    bar.hidden = false;
    document.body.classList.add("walking");
    one("#walk-at").textContent = `${at + 1} of ${sentences.length}`;
    const words = sentences[at].cloneNode(true);
    all("a", words).forEach((link) => link.remove());
    one("#walk-words").replaceChildren(...words.childNodes);
    one("#walk-back").disabled = at === 0;
    one("#walk-next").disabled = at === sentences.length - 1;
    if (!bar.contains(document.activeElement) || document.activeElement.disabled) bar.focus({ preventScroll: true });
    const target = seen[0] ?? one(`#${section}`);
    const tall = target.getBoundingClientRect().height > 0.6 * innerHeight;
    target.scrollIntoView({ block: tall ? "start" : "center", inline: "center" });
  };
  const end = () => {
    bar.hidden = true;
    document.body.classList.remove("walking");
    unmarked();
    startAt.focus();
  };

  startAt.hidden = false;
  startAt.addEventListener("click", () => show(0));
  one("#walk-back").addEventListener("click", () => show(at - 1));
  one("#walk-next").addEventListener("click", () => show(at + 1));
  one("#walk-end").addEventListener("click", end);
  bar.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) show(at + step);
    else if (event.key === "Escape") end();
    else return;
    event.preventDefault();
  });
};
if (one("#walk")) drawWalk();
document.documentElement.dataset.ready = "yes";
