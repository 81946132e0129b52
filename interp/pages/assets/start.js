redraw();
select({ layer: data.first[0], head: data.first[1], edges: +(one("input[name=edges]:checked")?.value ?? 0) });
// Maps of tokens that do not fit begin at their end, where the answer stands, a drawn circuit in its middle, where the
// logits are; so does each that a switch brings up.
const placed = () => all("[data-cells], svg.graph").forEach((shown) => {
  const room = shown.closest(".scroll");
  if (!shown.clientWidth || !room?.clientWidth || shown.dataset.placed) return;
  room.scrollLeft = (room.scrollWidth - room.clientWidth) / (shown.matches(".graph") ? 2 : 1);
  shown.dataset.placed = "yes";
});
document.addEventListener("change", placed);
placed();
