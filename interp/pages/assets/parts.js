// --- the views that follow the state -------------------------------------------------------------------------------

const showHead = () => {
  if (data.attention) one("#head-name").textContent = headName(state.layer, state.head);
  if (data.profiles) one("#head-profile").textContent = data.profiles[state.layer][state.head].split("\n").join(" · ");
  for (const element of all("[data-layer][data-head]")) {
    const chosen = +element.dataset.layer === state.layer && +element.dataset.head === state.head;
    element.classList.toggle("chosen", chosen);
    if (element.matches("button.thumb, button.cell, button.step")) element.setAttribute("aria-pressed", chosen);
    if (chosen && element.matches(".thumb, .unlooking")) {
      one("#head-profile").textContent = element.dataset.tip.split("\n").slice(1).join(" · ");
    }
  }
};

const showAttention = () => {
  const at = state.pointed ?? state.pos;
  const from = state.direction === "from";
  const values = data.names.map((_, i) =>
    from ? strength(state.layer, state.head, at, i) : strength(state.layer, state.head, i, at));
  const full = strongest(state.layer, state.head);
  all("#attended .chip").forEach((chip, i) => {
    const unseen = from ? i > at : i < at;
    shade(chip, values[i] / full);
    one("small", chip).textContent = unseen ? "–" : number(values[i], Math.min(3, digits));
    chip.classList.toggle("unseen", unseen);
    chip.classList.toggle("chosen", i === at);
    chip.classList.toggle("pointed", i === state.key);
  });
  const shown = state.key ?? values.indexOf(Math.max(...values));
  const most = state.key === null ? " most" : "";
  const [query, key] = from ? [at, shown] : [shown, at];
  const [verb, side] = state.weighting === "value" ? ["takes", "from"] : ["looks", "at"];
  one("#readout").textContent = !looks(state.layer) ? `${headName(state.layer, state.head)} has no attention pattern` :
    `${data.names[query]} (${query}) ${verb}${from ? most : ""} ${side} ${data.names[key]} (${key}): ${number(values[shown], digits)}`;
  const [, , end, what] = one("#ramp .scale").children;
  end.textContent = state.weighting === "value" ? number(full, 3) : "1";
  what.textContent = `${state.weighting === "value" ? "attention × ‖value·W_O‖" : "attention"}; rows: the token that looks, columns: the tokens looked at`;
  drawPattern();
};

const showNext = () => {
  one("#next-of").textContent = data.names[state.pos];
  one("#next-pos").textContent = state.pos;
  const ends = state.pos === n - 1;
  const rows = data.nexts[state.pos].map(([token, prob, logit], rank) => {
    const row = document.createElement("tr");
    row.classList.toggle("actual", rank === data.ranks[state.pos]);
    for (const text of [rank + 1, token, number(logit, 2), probability(prob), ""]) {
      row.append(Object.assign(document.createElement("td"), { textContent: text }));
    }
    row.children[1].className = "tok";
    row.children[4].className = "bar";
    row.children[4].append(document.createElement("i"));
    row.children[4].firstChild.style.width = `${100 * prob}%`;
    return row;
  });
  one("#next tbody").replaceChildren(...rows);
  const what = ends ? `The answer asked about is ${data.answer}` : `The prompt goes on with ${data.names[state.pos + 1]}`;
  one("#next-actual").textContent = `${what}, rank ${data.ranks[state.pos] + 1}.`;
  for (const element of all("#losses .chip, .lens thead th, #patching thead th")) {
    element.classList.toggle("chosen", +element.dataset.pos === state.pos);
  }
};

const showMoved = () => {
  const { layer, head } = state;
  const moved = data.moved[layer]?.[head];
  const signed = (x, digits) => (Number(x.toFixed(digits)) > 0 ? "+" : "") + number(x, digits);
  one("#moved-name").textContent = `What ${headName(layer, head)} moves to the end, by the token it comes from`;
  one("#moved").hidden = !moved;
  if (!moved) return void (one("#moved-sum").textContent = "Not split: this layer keeps a state of the past, not single tokens.");
  one("#moved-sum").textContent = `Logits, together ${signed(moved.reduce((a, b) => a + b, 0), 3)}: the head's cell above.`;
  all("#moved .chip").forEach((chip, i) => {
    shade(chip, Math.min(1, Math.abs(moved[i]) / data.reach));
    chip.classList.toggle("neg", moved[i] < 0);
    one("small", chip).textContent = signed(moved[i], 3);
  });
};

// A model without logits has neither next tokens nor an answer.
views.push(showHead, ...(data.attention ? [showAttention] : []), ...(data.nexts ? [showNext] : []), ...(data.moved ? [showMoved] : []));
