// --- keyboard: one tab stop per grid, arrows inside ----------------------------------------------------------------

for (const grid of all("[data-grid]")) {
  const items = all("[data-cell]", grid);
  const columns = +grid.dataset.grid;
  items.forEach((item, i) => { item.tabIndex = i ? -1 : 0; });
  grid.addEventListener("focusin", (event) => {
    if (items.includes(event.target)) items.forEach((item) => { item.tabIndex = item === event.target ? 0 : -1; });
  });
  grid.addEventListener("keydown", (event) => {
    const shown = items.filter((item) => !item.hasAttribute("hidden"));
    const at = shown.indexOf(document.activeElement);
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: shown.length - 1 - at };
    const next = shown[at + steps[event.key]];
    if (at < 0 || !next) return;
    event.preventDefault();
    next.focus();
  });
}

// --- explanations on hover and focus: the titles, shown at once and in our type ------------------------------------

const tip = one("#tip");
const showTip = (element, pointer, place) => {
  tip.textContent = element.dataset.tip;
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  // A line can be long: its explanation stands where it is pointed at.
  const at = place ?? (pointer && element.matches(".edge, .bundle, .wire") ? new DOMRect(pointer.clientX, pointer.clientY, 0, 0) : box);
  const size = tip.getBoundingClientRect();
  const above = at.top > size.height + 12;
  tip.style.top = `${above ? at.top - size.height - 7 : at.bottom + 7}px`;
  tip.style.left = `${Math.max(8, Math.min(at.left + at.width / 2 - size.width / 2, innerWidth - size.width - 8))}px`;
};
const hideTip = () => { tip.hidden = true; };
const explain = (element, text) => {
  element.dataset.tip = text;
  element.setAttribute("aria-description", text);
  element.addEventListener("pointerenter", (event) => showTip(element, event));
  element.addEventListener("focus", () => element.matches(":focus-visible") && showTip(element));
  element.addEventListener("pointerleave", hideTip);
  element.addEventListener("blur", hideTip);
};
for (const element of all("[title]")) {
  explain(element, element.title);
  element.removeAttribute("title");
}
for (const title of all("svg title")) {
  explain(title.parentElement, title.textContent);
  title.remove();
}
// What is pointed at moves away under the pointer; what the keyboard is at is explained where it comes to stand.
const follow = () => {
  const at = document.activeElement;
  if (at?.matches("[data-tip]:focus-visible:not(canvas)")) showTip(at);
  else hideTip();
};
addEventListener("scroll", follow, { capture: true, passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
