// When to draw: by the kernel's clock, and not under a pressed button.

const JUMP = 2000; // milliseconds by which two clocks of a page differ more than before

// The clock of the kernel: the page's own, less the smallest delay of a message until now. So a
// message that came late, because the page slept, or that is drawn late, changes nothing.
//
// A delay is a difference between the clocks, and the time that the message took. A message that
// was sent, by its clock, before the page asked for it tells that the clocks differ; so does one
// that came before it was sent. Else they are taken to agree, and the page to be busy.
// A message that was on its way already when the page asked tells nothing: a faster one shows that.
export class Clock {
  constructor() {
    this.reset();
    this.jumped();
  }

  reset() {
    this.delay = Infinity;
    this.early = -Infinity; // seconds by which a message was sent before it was asked for, at most
    this.ask();
  }

  // All messages that come from now on were sent after this moment
  ask() {
    this.asked = Date.now() / 1000;
  }

  hear(time) {
    if (this.jumped()) this.reset(); // this message may be older
    else this.early = Math.max(this.early, this.asked - time);
    this.delay = Math.min(this.delay, Date.now() / 1000 - time);
  }

  now() {
    const differ = (this.early > 0 && this.early <= this.delay) || this.delay < 0;
    return Date.now() / 1000 - (differ ? this.delay : 0);
  }

  // Whether the page slept since it was last asked, or its clock was set
  jumped() {
    const [before, now] = [this.base, Date.now() - performance.now()];
    this.base = now;
    return Math.abs(now - before) > JUMP;
  }
}

const PRESS = 10000; // milliseconds that a button may be pressed before things move under it

// Draws, but nothing that is pressed is moved or replaced, or there would be no click: what is to be
// drawn then is drawn when it is let go, the last of it.
export class Calm {
  constructor() {
    this.pressed = false;
    this.due = null;
    this.timer = 0;
    this.down = (event) => {
      if (event.type === "keydown" && event.key !== " ") return;
      clearTimeout(this.timer);
      this.pressed = true;
      this.timer = setTimeout(() => this.release(), PRESS);
    };
    this.up = (event) => {
      if (!this.pressed || (event.type === "blur" && event.target !== window)) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.release()); // the click comes first
    };
    for (const kind of ["pointerup", "pointercancel", "keyup", "blur"]) window.addEventListener(kind, this.up, true);
  }

  watch(element) {
    for (const kind of ["pointerdown", "keydown"]) element.addEventListener(kind, this.down, true);
  }

  draw(what) {
    if (this.pressed) this.due = what;
    else what();
  }

  release() {
    const due = this.due;
    this.pressed = false;
    this.due = null;
    if (due) due();
  }

  dispose() {
    clearTimeout(this.timer);
    this.due = null;
    for (const kind of ["pointerup", "pointercancel", "keyup", "blur"]) window.removeEventListener(kind, this.up, true);
  }
}
