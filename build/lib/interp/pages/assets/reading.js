// --- what the chosen head writes for a token, and what it looks for, from the weights --------------------------------

const readWords = (words) => {
  const lists = Object.fromEntries(["raises", "lowers", "seeks"].map((name) => {
    const { each, ids, scores, most } = words[name];
    return [name, { each, most, ids: unpacked(ids, Uint16Array), scores: unpacked(scores, Int16Array) }];
  }));
  const showWords = () => {
    const pos = state.pointed ?? state.pos;
    const head = state.layer * data.heads + state.head;
    one("#reading-head").textContent = headName(state.layer, state.head);
    one("#reading-token").textContent = data.names[pos];
    for (const [name, { each, ids, scores, most }] of Object.entries(lists)) {
      const first = (head * words.count + words.tokens[pos]) * each;
      const rows = Array.from({ length: each }, (_, rank) => {
        const row = document.createElement("tr");
        const score = (scores[first + rank] / 32767) * most[head];
        for (const text of [words.texts[ids[first + rank]], (score > 0 ? "+" : "") + number(score, 3)]) {
          row.append(Object.assign(document.createElement("td"), { textContent: text }));
        }
        row.firstChild.className = "tok";
        return row;
      });
      one(`[data-list=${name}] tbody`).replaceChildren(...rows);
    }
  };
  views.push(showWords);
};
if (data.words) readWords(data.words);
