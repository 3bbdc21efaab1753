// The widget: a view of the snapshot that the kernel keeps up to date while somebody sees it.
import { Clock, render } from "./view/index.js";

const ALIVE = 10000; // milliseconds after which the kernel is told again that somebody looks on

function open({ model, el }) {
  const name = crypto.randomUUID ? crypto.randomUUID() : String(Math.random());
  const pending = new Map();
  let count = 0;

  const answered = (message) => {
    if (message.to !== name || !pending.has(message.id)) return;
    const { resolve, reject } = pending.get(message.id);
    pending.delete(message.id);
    if (message.ok) resolve(message.value);
    else reject(new Error(message.error));
  };
  const ask = (request) =>
    new Promise((resolve, reject) => {
      count += 1;
      pending.set(count, { resolve, reject });
      model.send({ ...request, from: name, id: count });
    });

  // The first snapshot may be old; it says nothing about the time now.
  const clock = new Clock();
  const view = render(el, model.get("snapshot"), {
    clock,
    actions: {
      cancel: (job, force) => ask({ do: "cancel", job, force }),
      interrupt: (job) => ask({ do: "interrupt", job }),
      kill: (actor) => ask({ do: "kill", actor }),
      stop: (sweep) => ask({ do: "stop", sweep }),
      logs: (job, position) => ask({ do: "logs", job, position }),
    },
  });

  let inside = false;
  let said = false;
  const look = () => {
    const visible = inside && document.visibilityState === "visible";
    const focus = visible && el.contains(document.activeElement);
    if (visible && !said) clock.ask();
    if (visible || said) model.send({ do: "visible", from: name, visible, focus });
    said = visible;
  };
  const leave = () => {
    inside = false;
    look();
  };
  const changed = () => {
    const snapshot = model.get("snapshot");
    clock.hear(snapshot.time);
    view.update(snapshot);
  };
  const observer = new IntersectionObserver((entries) => {
    inside = entries[entries.length - 1].isIntersecting;
    look();
  });
  el.setAttribute("data-lm-suppress-shortcuts", "true"); // or JupyterLab takes the arrows for the cells
  const timer = setInterval(() => said && look(), ALIVE);
  const moved = () => setTimeout(look); // then the focus is where it goes
  observer.observe(el);
  el.addEventListener("focusin", moved);
  el.addEventListener("focusout", moved);
  document.addEventListener("visibilitychange", look);
  window.addEventListener("pagehide", leave);
  model.on("change:snapshot", changed);
  model.on("msg:custom", answered);

  return () => {
    leave();
    clearInterval(timer);
    observer.disconnect();
    document.removeEventListener("visibilitychange", look);
    window.removeEventListener("pagehide", leave);
    model.off("change:snapshot", changed);
    model.off("msg:custom", answered);
    view.dispose();
  };
}

export default { render: open };
