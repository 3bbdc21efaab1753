// What a job has shown, below the lists.

import { stylesOf } from "./ansi.js";
import { make, setHidden, setText } from "./elements.js";
import { keyOf } from "./texts.js";

const MOST = 200000; // characters that are drawn, from the end

export class Log {
  constructor(view) {
    this.view = view;
    this.element = make("section", "gm-log", { "aria-label": "Log" });
    this.heading = make("div", "gm-heading");
    this.close = make("button", "gm-button", { type: "button", "aria-label": "Close the log" });
    this.close.textContent = "Close";
    this.note = make("p", "gm-none");
    this.text = make("pre", "gm-log-text", { tabindex: 0, "aria-label": "Text of the log" });
    this.close.addEventListener("click", () => { this.element.hidden = true; });
    this.element.append(this.heading, this.close, this.note, this.text);
    setHidden(this.element, true);
    this.shown = null; // of the job whose log this is: its key, its text, what comes next
    this.visible = false;
    this.observer = new IntersectionObserver((entries) => {
      this.visible = entries[entries.length - 1].isIntersecting;
    });
    this.observer.observe(this.element);
  }

  async open(job) {
    if (this.view.actions.openLogs) {
      await this.view.act("openLogs", job);
      return;
    }
    const part = await this.view.act("logs", keyOf(job), 0);
    if (part === undefined) return;
    this.shown = { key: keyOf(job), text: "", cut: false };
    setText(this.heading, `What #${job.id} ${job.name} has shown`);
    setHidden(this.element, false);
    this.add(part);
    this.text.scrollTop = this.text.scrollHeight;
    this.close.focus();
  }

  // Ask for what is new, as long as the job is not over and somebody looks on
  async follow() {
    const { shown } = this;
    if (!shown || !shown.lasts || shown.asks || !this.visible || document.hidden) return;
    shown.asks = true;
    try {
      const part = await this.view.actions.logs(shown.key, shown.position);
      if (shown === this.shown) this.add(part);
    } catch (error) {
      shown.lasts = false;
      this.view.fail(error);
    } finally {
      shown.asks = false;
    }
  }

  add({ text, truncated, position, state }) {
    const { shown } = this;
    const all = shown.text + text;
    shown.cut = shown.cut || Boolean(truncated) || all.length > MOST;
    shown.position = position;
    shown.lasts = state === "running" || state === "queued";
    setText(this.note, shown.cut ? "The beginning is left out." : "");
    setHidden(this.note, !shown.cut);
    if (text || !all) this.draw(all.slice(-MOST));
  }

  // Only who is at the end goes on with it
  draw(text) {
    const { scrollHeight, scrollTop, clientHeight } = this.text;
    const atEnd = scrollTop + clientHeight >= scrollHeight - 4;
    this.shown.text = text;
    this.text.replaceChildren(...stylesOf(text || "nothing yet").map(styled));
    if (atEnd) this.text.scrollTop = this.text.scrollHeight;
  }

  dispose() {
    this.observer.disconnect();
  }
}

function styled([text, style]) {
  const element = document.createElement("span");
  element.textContent = text;
  Object.assign(element.style, style);
  return element;
}
