redraw();
select({ layer: data.first[0], head: data.first[1], edges: +(one("input[name=edges]:checked")?.value ?? 0) });
// Maps of tokens that do not fit begin at their end, where the answer stands; so does each that a switch brings up.
const atEnd = () => all("[data-cells]").forEach((table) => {
  const room = table.closest(".scroll");
  if (room?.clientWidth && !room.dataset.moved) Object.assign(room, { scrollLeft: room.scrollWidth }).dataset.moved = "yes";
});
document.addEventListener("change", atEnd);
atEnd();
