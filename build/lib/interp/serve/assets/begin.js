Object.assign(state, { part: "head", layer: 0, head: 0, neuron: 0, at: null, answer: null, pointed: null });
for (const cell of all("button.cell")) explain(cell, "");
for (const table of all("#attribution .map")) {
  table.style.minWidth = `${1.8 + 2.15 * (data.heads + data.mlp)}rem`;
}
redraw();
showEdits();
refresh();
