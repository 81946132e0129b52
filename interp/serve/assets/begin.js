Object.assign(state, { part: "head", layer: 0, head: 0, neuron: 0, at: null, answer: null, pointed: null });
for (const cell of all("button.cell")) explain(cell, "");
redraw();
showEdits();
refresh();
