// Details on demand.

import { freshId, keyed, make, setStyle, setText } from "./elements.js";

// Shows the lines that the element below the pointer, or with the focus, has in `tip_`. It is in the
// top layer, because a sidebar cuts what sticks out of it.
export class Tip {
  constructor(root) {
    this.element = make("div", "gm-tip", { role: "tooltip", popover: "manual", id: freshId("tip") });
    this.root = root;
    this.hide = () => this.show(null);
    this.rest = () => this.show(root.querySelector(":focus-visible"));
    this.escape = (event) => event.key === "Escape" && this.hide();
    root.addEventListener("pointerover", ({ target }) => (this.find(target) ? this.show(target) : this.rest()));
    root.addEventListener("pointerleave", this.rest);
    root.addEventListener("focusin", ({ target }) => this.show(target));
    root.addEventListener("focusout", this.hide);
    root.addEventListener("keydown", this.escape);
    for (const each of ["scroll", "resize"]) window.addEventListener(each, this.rest, true);
    root.append(this.element);
  }

  find(target) {
    let at = target;
    while (at && at !== this.root && !at.tip_) at = at.parentElement;
    return at && at.tip_ ? at : null;
  }

  show(target) {
    if (this.at) this.at.removeAttribute("aria-describedby");
    this.at = this.find(target);
    if (this.at) this.at.setAttribute("aria-describedby", this.element.id);
    this.again();
  }

  again() {
    const { at, element } = this;
    if (!element.showPopover) return; // an old browser
    const lines = at && at.isConnected ? at.tip_() : [];
    const open = element.matches(":popover-open");
    if (!lines.length && open) element.hidePopover();
    if (!lines.length) return;
    keyed(element, lines, (_, number) => number, () => make("div"), setText);
    if (!open) element.showPopover();
    const [box, own] = [at.getBoundingClientRect(), element.getBoundingClientRect()];
    const below = box.bottom + 4 + own.height <= window.innerHeight;
    setStyle(element, "left", `${Math.max(4, Math.min(box.left, window.innerWidth - own.width - 4))}px`);
    setStyle(element, "top", `${below ? box.bottom + 4 : Math.max(4, box.top - own.height - 4)}px`);
  }

  dispose() {
    for (const each of ["scroll", "resize"]) window.removeEventListener(each, this.rest, true);
  }
}
