// --- directions: a slider each, and random ones beside ---------------------------------------------------------------

const doses = all("[data-direction]");
let steered = null;  // what random directions do, once the server has tried them
const showDoses = () => {
  for (const input of doses) {
    if (document.activeElement === input) continue;
    input.value = has({ where: input.dataset.direction })?.scale ?? 0;
    tell(input);
  }
  if (!doses.length) return;
  one("#dosed-answer").textContent = shown.whole ? shown.whole.tokens.join("") : shown.answer.token;
  const found = steered?.of === shown ? steered.found : null;
  const rows = all("#dosed tbody tr");
  [["probability", shown.whole ? product : probability], ["kl", (x) => number(x, 2)]].forEach(([name, write], row) => {
    const cells = all("td", rows[row]);
    const values = found?.[name];
    const texts = values ? [write(values[0]), write(values[1]), `${write(values[2])} to ${write(values[3])}`] : ["–", "–", "–"];
    cells.forEach((cell, i) => { cell.textContent = texts[i]; });
  });
  const kl = found?.kl;
  one("#dosed-says").textContent = !kl ? edits().some((edit) => edit.change === "add") ? "Random directions of its length are being tried …" : "Nothing is added yet."
    : kl[1] > kl[3] ? "It moves the model further than any random direction of its length."
      : kl[1] < kl[2] ? "It moves the model less than any random direction of its length."
        : "Random directions of its length move the model as far.";
};
views.push(showDoses);
afterwards.push(() => {
  const of = shown;
  if (!edits().some((edit) => edit.change === "add")) return null;
  return ask("random", { ...question(), position: of.position, answer: of.whole?.ids ?? of.answer.id }, (found) => {
    steered = { of, found };
    showDoses();
  });
});

// One drag is one step of the history; 0 takes the direction away.
let dosing = false;
for (const input of doses) {
  input.addEventListener("input", () => {
    const edit = { where: input.dataset.direction, change: "add", scale: +input.value };
    if (edit.scale) put(edit, dosing && has(edit)); else drop(edit);
    dosing = edit.scale !== 0;
  });
  input.addEventListener("change", () => { dosing = false; });
}
