// The page is whole without this. With it, news come by themselves, and a command is copied by a button.
"use strict";
const root = document.documentElement;
const live = document.getElementById("live");
const says = document.getElementById("live-says");
let source = null;
let seen = root.dataset.seen;

function tell(words, on) {
  if (says.textContent !== words) says.textContent = words;
  live.classList.toggle("on", on);
}

function take(event) {
  const news = JSON.parse(event.data);
  if (news.shape !== root.dataset.shape) {
    // Another run, or another farflung: not more than once in a while, whatever the server says.
    source.close();
    setTimeout(() => location.reload(), 3000 + 4000 * Math.random());
    return;
  }
  seen = event.lastEventId;
  for (const [id, html] of Object.entries(news.parts)) {
    const old = document.getElementById(id);
    if (old) old.outerHTML = html; // made by the server, where every word of others is escaped
  }
  tell("live", true);
}

function open() {
  if (source) source.close();
  source = new EventSource("live?" + seen);
  source.onopen = () => tell("live", true);
  source.onmessage = take;
  source.onerror = () => {
    tell("no line to the server; looking again", false);
    if (source.readyState === EventSource.CLOSED) setTimeout(open, 5000 + 5000 * Math.random());
  };
}

function addCopyButtons() {
  if (!navigator.clipboard) return;
  for (const command of document.querySelectorAll(".command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command.querySelector("code").textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    command.append(button);
  }
}

// A page that nobody sees needs no news.
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) open();
  else if (source) { source.close(); source = null; tell("paused while it is hidden", false); }
});
addCopyButtons();
if (!document.hidden) open();
