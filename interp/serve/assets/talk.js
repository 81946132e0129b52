// --- questions to the server: one of a kind at a time, the newest wins ----------------------------------------------

const tab = crypto.randomUUID();
const running = {};
let shown = null;
let answered = null;  // the prompt that is shown
let tokensOf = null;  // the prompts whose tokens are shown
const early = [];  // what shows the tokens of a prompt that is not computed yet
const afterwards = [];  // what is asked once a question was answered

const post = async (path, body, signal) => {
  const response = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  const found = await response.json();
  if (!response.ok) throw new Error(found.error);
  return found;
};

// A prompt that was refused stays marked, beside the page of the one before it.
const complain = (message, aboutPrompt = true) => {
  const prompt = one("#prompt");
  const older = Boolean(message) && aboutPrompt && answered !== null && answered !== prompt.value;
  prompt.setAttribute("aria-invalid", older);
  one("#error").hidden = !message;
  one("#error").textContent = `${message ?? ""}${older ? ` What is shown is of the earlier prompt: ${answered}` : ""}`;
  one("main").classList.toggle("stale", Boolean(message) && aboutPrompt);
};
const busy = () => {
  const now = Object.values(running).some(Boolean);
  one("#cancel").disabled = !now;
  if (now) one("#status").textContent = "computing …";
};

// The server stops this page's older question; here its answer is dropped.
const ask = async (path, body, show) => {
  const aboutPrompt = ["tokens", "look"].includes(path);
  const owed = !aboutPrompt && (running.look || running.tokens);
  Object.values(running).forEach((other) => other?.abort());
  const mine = (running[path] = new AbortController());
  const start = performance.now();
  busy();
  try {
    const found = await post(path, { tab, ...body }, mine.signal);
    if (running[path] !== mine) return false;
    show(found, body);
    if (path !== "tokens") {
      if (path !== "random") complain(null);
      one("#status").textContent = `${Math.round(performance.now() - start)} ms`;
    }
    return true;
  } catch (error) {
    if (running[path] !== mine || error.name === "AbortError") return false;
    one("#status").textContent = "";
    const message = error instanceof TypeError ? "The server does not answer: is interp serve still running?" : error.message;
    complain(message, aboutPrompt);
  } finally {
    const last = running[path] === mine;
    if (last) running[path] = null;
    busy();
    if (last && owed) refresh();
  }
  return false;
};

const cancel = () => {
  if (running.look || running.tokens) complain("Stopped: what is shown is older than the last change. The next one computes both.");
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

const question = () => ({ prompt: one("#prompt").value, second: one("#second").value || null, edits: edits() });
// A token that was chosen goes before what is typed.
const answers = () => ({
  position: state.at, answer: state.answer ?? (one("#answer-text").value || null), wrong: one("#wrong-text").value || null,
});
// Scores of all heads, and how far their attention moved, need every pattern: asked for where a map shows them.
const wanted = () => ({ scores: Boolean(one("#measure").value), moved: one("input[name=shown]:checked").value === "moved" });
const look = () => ask("look", {
  ...question(), ...answers(), ...wanted(),
  layer: state.picked ? state.layer : null, head: state.head,
}, (found, asked) => {
  [shown, sent, answered] = [found, asked.edits, asked.prompt];
  if (!state.picked) Object.assign(state, found.near);
  views.forEach((view) => view());
});
// The tokens of a new prompt appear before anything is computed.
const refresh = async () => {
  const { prompt, second } = question();
  const fresh = `${prompt}\n${second}` !== tokensOf;
  const { answer, wrong } = answers();
  if (fresh && !await ask("tokens", { prompt, second, answer, wrong }, (found) => {
    tokensOf = `${prompt}\n${second}`;
    early.forEach((view) => view(found));
  })) return;
  if (await look()) await Promise.all(afterwards.map((act) => act()));
};
