// --- choosing a part and changing it -------------------------------------------------------------------------------

const MEANS = {
  head: "A head's z is changed: what it moves, before W_O; the output bias of the layer stays.",
  mlp: "What the MLP adds to the stream is changed, its output bias included.",
  neuron: "The neuron is changed after its non-linearity (and gate).",
};
const MEAN = "Its mean is that of the clean run, over all positions of the prompt, the start token included.";
const NEEDS = { mean: { over: "reference" } };
const positions = new Set();

// Where the panel's edits act: the chosen part, at the chosen positions.
const chosen = () => {
  const { part, layer } = state;
  const where = part === "mlp" ? names.mlp(layer) : names[part](layer, state[part]);
  if (one("input[name=where]:checked").value === "all") return { where };
  const pos = [...positions].sort((a, b) => a - b);
  return { where, at: { pos: pos.length === 1 ? pos[0] : pos } };
};
const apply = (to, extra = NEEDS[to], amends = false) => {
  const here = chosen();
  if (here.at?.pos.length === 0) return complain("Choose at least one position, or all.");
  if (to === "none") return drop(here);
  return put({ where: here.where, change: to, ...extra, ...(here.at && { at: here.at }) }, amends);
};

const showPart = () => {
  one("#part-name").textContent = chosen().where;
  one("#part-kind").textContent = state.part === "mlp" ? "MLP" : state.part;
  one("#means").textContent = `${MEANS[state.part]} ${MEAN}`;
  one("#value-field").hidden = state.part !== "neuron";
  one("[data-to=resample]").disabled = !shown.second;
  const mine = has(chosen());
  for (const button of all("#panel [data-to]")) {
    button.setAttribute("aria-pressed", (mine?.change ?? "none") === button.dataset.to);
  }
  if (document.activeElement !== one("#factor")) {
    one("#factor").value = mine?.factor ?? 1;
    tell(one("#factor"));
  }
  for (const pos of [...positions]) if (pos >= shown.tokens.length) positions.delete(pos);
  const some = one("input[name=where]:checked").value === "some";
  one("#where").hidden = !some;
  if (some) chips(one("#where"), shown.tokens, (pos) => positions.has(pos));
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
  apply("scale", { factor: +event.target.value }, dragging && has(chosen())?.change === "scale");
  dragging = true;
});
one("#factor").addEventListener("change", () => { dragging = false; });

const choose = (what) => {
  Object.assign(state, { pointed: null }, what);
  if ("part" in what) state.picked = true;
  dragging = false;
  refresh();
};
document.addEventListener("click", (event) => {
  const at = (selector) => event.target.closest(selector);
  const cell = at("button.cell");
  if (cell) choose({ layer: +cell.dataset.layer, ...(cell.dataset.head === undefined ? { part: "mlp" } : { part: "head", head: +cell.dataset.head }) });
  const to = at("#panel [data-to]");
  if (to) apply(to.dataset.to, to.dataset.to === "set" ? { values: +one("#value").value } : NEEDS[to.dataset.to]);
  const token = at("#tokens .chip, [data-look]");
  if (token) {
    forget();
    // A token chosen among an answer's is the end of that answer, whose others stay in the row.
    choose({ at: +(token.dataset.pos ?? token.dataset.look), ...(!Array.isArray(state.answer) && { answer: null }) });
  }
  const where = at("#where .chip");
  if (where) {
    const pos = +where.dataset.pos;
    if (!positions.delete(pos)) positions.add(pos);
    showPart();
  }
  const answer = at("[data-id]");
  if (answer) {
    forget();
    const before = shown.whole?.ids.slice(0, Math.max(0, shown.position - shown.prompt_length + 1)) ?? [];
    one("#answer-text").value = "";
    choose({ answer: before.length ? [...before, +answer.dataset.id] : +answer.dataset.id });
  }
  const neuron = at("[data-neuron]");
  if (neuron) choose({ part: "neuron", neuron: +neuron.dataset.neuron });
  const spot = at("[data-stream]");
  if (spot) {
    const edit = fromSecond(...spot.dataset.stream.split(",").map(Number));
    if (has(edit)) drop(edit); else put(edit);
  }
});
one("#choose-neuron").addEventListener("click", () => choose({ part: "neuron", neuron: +one("#neuron").value }));
for (const input of all("input[name=where]")) input.addEventListener("change", showPart);
for (const input of all("input[name=shown], #measure")) {
  input.addEventListener("change", () => (Object.entries(wanted()).some(([name, is]) => is && !shown[name]) ? refresh() : showMaps()));
}

// What was generated or written before a change is gone with it.
const NOTE = one("#continued-note").textContent;
const forget = () => {
  running.continue?.abort();
  running.source?.abort();
  one("#continued").hidden = one("#source").hidden = true;
  one("#continued-note").textContent = NOTE;
  one("#copied").textContent = "";
};
forgets.push(forget);

let typing;
const later = (act) => {
  clearTimeout(typing);
  typing = setTimeout(act, 250);
};
for (const id of ["#prompt", "#second"]) {
  one(id).addEventListener("input", () => {
    if (id === "#prompt") {
      Object.assign(state, { at: null, answer: null });
      // The answers that the page began with belong to its first prompt.
      for (const given of all("#answer-text, #wrong-text")) if (given.value === given.defaultValue) given.value = "";
    }
    forget();
    later(refresh);
  });
}
for (const id of ["#answer-text", "#wrong-text"]) {
  one(id).addEventListener("input", () => {
    if (id === "#answer-text") state.answer = null;
    if (state.at >= shown?.prompt_length) state.at = null;  // a token of the answer that there was
    forget();
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
    one("#continued-note").textContent = found.tokens.every((count) => count === found.same) ? "Both go on alike."
      : found.same ? `They agree in the first ${found.same === 1 ? "token" : `${found.same} tokens`}.` : "They differ from the first token on.";
  });
});
one("#copy").addEventListener("click", () => ask("source", { ...question(), ...answers() }, async (found) => {
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
