// --- choosing a part and changing it -------------------------------------------------------------------------------

const MEANS = {
  head: "A head's z is changed: what it moves, before W_O; the output bias of the layer stays. Its mean is over all positions of the prompt, the start token included, as the edited run computes it.",
  mlp: "What the MLP adds to the stream is changed, its output bias included. Its mean is over all positions of the prompt, the start token included, as the edited run computes it.",
  neuron: "The neuron is changed behind its non-linearity (and gate). Its mean is over all positions of the prompt, the start token included, as the edited run computes it.",
};
const positions = new Set();

const part = () => ({
  part: state.part, layer: state.layer, ...(state.part === "head" && { head: state.head }),
  ...(state.part === "neuron" && { neuron: state.neuron }),
  positions: one("input[name=where]:checked").value === "all" ? null : [...positions].sort((a, b) => a - b),
});
const apply = (to, extra = {}, amends = false) => {
  const here = part();
  if (here.positions?.length === 0) return complain("Choose at least one position, or all.");
  if (to === "none") return drop(here);
  return put({ ...here, change: { to, ...extra } }, amends);
};

const showPart = () => {
  const { layer, head, neuron } = state;
  one("#part-name").textContent = { head: `Head ${layer}.${head}`, mlp: `MLP ${layer}`, neuron: `Neuron ${layer}.${neuron}` }[state.part];
  one("#means").textContent = MEANS[state.part];
  one("#value-field").hidden = state.part !== "neuron";
  one("[data-to=second]").disabled = !shown.second;
  const mine = has(part());
  for (const button of all("#changes [data-to]")) {
    button.setAttribute("aria-pressed", (mine?.change.to ?? "none") === button.dataset.to);
  }
  if (document.activeElement !== one("#factor")) {
    one("#factor").value = mine?.change.factor ?? 1;
    tell(one("#factor"));
  }
  for (const pos of [...positions]) if (pos >= shown.tokens.length) positions.delete(pos);
  const some = one("input[name=where]:checked").value === "some";
  one("#where").hidden = !some;
  if (some) renew(one("#where"), shown.tokens.map((name, pos) => chip(name, pos, positions.has(pos))));
};
views.push(showPart);

const tell = (input) => {
  const text = input.id === "top-k" && input.value === "0" ? "all" : input.id === "temperature" && input.value === "0" ? "greedy" : number(+input.value, input.step.includes(".") ? input.step.split(".")[1].length : 0);
  one(`output[for=${input.id}]`).textContent = text;
};
for (const input of all("input[type=range]")) {
  input.addEventListener("input", () => tell(input));
  tell(input);
}

// One drag of the slider is one step of the history.
let dragging = false;
one("#factor").addEventListener("input", (event) => {
  apply("scale", { factor: +event.target.value }, dragging && has(part())?.change.to === "scale");
  dragging = true;
});
one("#factor").addEventListener("change", () => { dragging = false; });

const choose = (what) => {
  Object.assign(state, { pointed: null }, what);
  dragging = false;
  refresh();
};
document.addEventListener("click", (event) => {
  const at = (selector) => event.target.closest(selector);
  const cell = at("button.cell");
  if (cell) choose({ layer: +cell.dataset.layer, ...(cell.dataset.head === undefined ? { part: "mlp" } : { part: "head", head: +cell.dataset.head }) });
  const to = at("#panel [data-to]");
  if (to) apply(to.dataset.to, to.dataset.to === "value" ? { value: +one("#value").value } : {});
  const token = at("#tokens .chip");
  if (token) choose({ at: +token.dataset.pos, answer: null });
  const where = at("#where .chip");
  if (where) {
    const pos = +where.dataset.pos;
    if (!positions.delete(pos)) positions.add(pos);
    showPart();
  }
  const answer = at("[data-id]");
  if (answer) {
    one("#answer-text").value = "";
    choose({ answer: +answer.dataset.id });
  }
  const neuron = at("[data-neuron]");
  if (neuron) choose({ part: "neuron", neuron: +neuron.dataset.neuron });
  const spot = at("[data-stream]");
  if (spot) {
    const [layer, position] = spot.dataset.stream.split(",").map(Number);
    const edit = { part: "stream", layer, position };
    if (has(edit)) drop(edit); else put(edit);
  }
});
one("#choose-neuron").addEventListener("click", () => choose({ part: "neuron", neuron: +one("#neuron").value }));
for (const input of all("input[name=where]")) input.addEventListener("change", showPart);
for (const input of all("input[name=shown]")) input.addEventListener("change", showMaps);

let typing;
const later = (act) => {
  clearTimeout(typing);
  typing = setTimeout(act, 250);
};
for (const id of ["#prompt", "#second"]) {
  one(id).addEventListener("input", () => {
    if (id === "#prompt") Object.assign(state, { at: null, answer: null });
    later(refresh);
  });
}
for (const id of ["#answer-text", "#wrong-text"]) {
  one(id).addEventListener("input", () => {
    if (id === "#answer-text") state.answer = null;
    later(refresh);
  });
}

// --- going on, and the script --------------------------------------------------------------------------------------

one("#go-on").addEventListener("click", () => {
  const [k, p] = [+one("#top-k").value, +one("#top-p").value];
  ask("continue", {
    ...question(), tokens: +one("#count").value, temperature: +one("#temperature").value,
    top_k: k || null, top_p: p < 1 ? p : null, seed: Math.trunc(+one("#seed").value),
  }, (found) => {
    one("#continued").hidden = false;
    one("#continued-clean").textContent = found.clean;
    one("#continued-edited").textContent = found.edited;
    one("#continued-note").textContent = found.same === found.tokens[0] && found.same === found.tokens[1]
      ? "Both go on alike." : `They part after ${found.same} ${found.same === 1 ? "token" : "tokens"}.`;
  });
});
one("#copy").addEventListener("click", () => ask("source", question(), async (found) => {
  const source = one("#source");
  source.textContent = found.python;
  source.hidden = false;
  try {
    await navigator.clipboard.writeText(found.python);
    one("#copied").textContent = "copied";
  } catch {
    one("#copied").textContent = "select and copy it below";
  }
}));
