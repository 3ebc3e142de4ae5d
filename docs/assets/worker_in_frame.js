// Search without a server: of a page opened from disk browsers refuse to start a worker, so it runs in a hidden frame.
// It stands in for Worker as far as the search needs it: postMessage both ways, and message events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const element = inside.document.createElement("script");
      element.src = new URL(script, location.href).href;
      element.onload = () => this.ready();
      inside.document.body.appendChild(element);
    }

    ready() {
      const waiting = this.waiting;
      this.waiting = null;
      waiting.forEach((data) => this.postMessage(data));
    }

    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data);
        return;
      }
      const { contentWindow } = this.frame;
      // Not at once: a real worker answers later, too.
      setTimeout(() => contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
