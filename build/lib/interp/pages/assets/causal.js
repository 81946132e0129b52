// --- the faithfulness curve follows the number of edges drawn, and chooses it ----------------------------------------

if (one(".curve")) {
  views.push(() => all("[data-edges]").forEach((part) => part.classList.toggle("chosen", +part.dataset.edges === state.edges)));
  document.addEventListener("click", (event) => {
    const part = event.target.closest("[data-edges]");
    const step = part && one(`input[name=edges][value="${part.dataset.edges}"]`);
    if (step) step.click();
  });
}
