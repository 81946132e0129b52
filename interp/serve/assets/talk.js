// --- questions to the server: one of a kind at a time, the newest wins ----------------------------------------------

const tab = crypto.randomUUID();
const running = {};
let shown = null;
let answered = null;  // the prompt that is shown

const post = async (path, body, signal) => {
  const response = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
};

// A prompt that was refused stays marked, beside the page of the one before it.
const complain = (message) => {
  const prompt = one("#prompt");
  const older = Boolean(message) && answered !== null && answered !== prompt.value;
  prompt.setAttribute("aria-invalid", older);
  one("#error").hidden = !message;
  one("#error").textContent = `${message ?? ""}${older ? ` What is shown is of the earlier prompt: ${answered}` : ""}`;
  one("main").classList.toggle("stale", Boolean(message));
};
const busy = () => {
  const now = Object.values(running).some(Boolean);
  one("#cancel").disabled = !now;
  if (now) one("#status").textContent = "computing …";
};

// The server stops this page's older question; here its answer is dropped.
const ask = async (path, body, show) => {
  const owed = path !== "look" && running.look;
  Object.values(running).forEach((other) => other?.abort());
  const mine = (running[path] = new AbortController());
  const start = performance.now();
  busy();
  try {
    const found = await post(path, { tab, ...body }, mine.signal);
    if (running[path] !== mine) return;
    show(found, body);
    complain(null);
    one("#status").textContent = `${Math.round(performance.now() - start)} ms`;
  } catch (error) {
    if (running[path] !== mine || error.name === "AbortError") return;
    one("#status").textContent = "";
    complain(error instanceof TypeError ? "The server does not answer: is interp serve still running?" : error.message);
  } finally {
    const last = running[path] === mine;
    if (last) running[path] = null;
    busy();
    if (last && owed) refresh();
  }
};

const cancel = () => {
  if (running.look) complain("Stopped: what is shown is older than the last change. The next one computes both.");
  for (const path in running) {
    running[path]?.abort();
    running[path] = null;
  }
  busy();
  one("#status").textContent = "stopped";
  return post("cancel", { tab });
};
one("#cancel").addEventListener("click", cancel);
addEventListener("pagehide", () => {
  fetch("cancel", {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ tab }), keepalive: true,
  }).catch(() => {});
});

const question = () => ({
  prompt: one("#prompt").value, second: one("#second").value || null, edits: edits(), position: state.at,
});
const refresh = () => ask("look", {
  ...question(), answer: state.answer ?? (one("#answer-text").value || null), wrong: one("#wrong-text").value || null,
  layer: state.picked ? state.layer : null, head: state.head,
}, (found, asked) => {
  [shown, sent, answered] = [found, asked.edits, asked.prompt];
  if (!state.picked) Object.assign(state, found.near);
  views.forEach((view) => view());
});
