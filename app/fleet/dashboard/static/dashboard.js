// Brings the page up to date: fetches it again every two seconds while it is visible, and changes what is different, in
// place. Focus, scroll position, and what a viewer has typed stay: the browser keeps the value of a field in which a
// viewer has typed, whatever its attributes become. Without this script every page works as well.
"use strict";

const EVERY = 2000;
const LONGEST = 30000;
let paused = false;
let wait = EVERY;
let timer;

const status = document.getElementById("updates");

function say(text) {
  if (status.textContent !== text) status.textContent = text;
}

// -- changing what is different -----------------------------------------------------------------------------------------

function merge(present, next) {
  if (present.nodeType !== next.nodeType || present.nodeName !== next.nodeName) {
    present.replaceWith(next.cloneNode(true));
    return;
  }
  if (present.nodeType === Node.TEXT_NODE) {
    if (present.data !== next.data) present.data = next.data;
    return;
  }
  if (present.nodeType !== Node.ELEMENT_NODE) return;
  for (const { name } of [...present.attributes]) {
    if (!next.hasAttribute(name)) present.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (present.getAttribute(name) !== value) present.setAttribute(name, value);
  }
  const before = [...present.childNodes];
  const after = [...next.childNodes];
  after.forEach((child, index) => {
    if (index < before.length) merge(before[index], child);
    else present.append(child.cloneNode(true));
  });
  before.slice(after.length).forEach((child) => child.remove());
}

// -- fetching -----------------------------------------------------------------------------------------------------------

async function update() {
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "manual" });
    if (answer.type === "opaqueredirect") return location.reload();
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const next = page.getElementById("main");
    if (!next) throw new Error("no page");
    // This page is an error, and the error is over.
    if (!document.querySelector("nav") && page.querySelector("nav")) return location.reload();
    if (!selecting()) merge(document.getElementById("main"), next);
    wait = EVERY;
    say("");
  } catch {
    wait = Math.min(2 * wait, LONGEST);
    say("no answer; this page is not up to date");
  }
  plan();
}

// The viewer marks text: replacing it would end that.
function selecting() {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed;
}

function plan() {
  clearTimeout(timer);
  // The sign-in, and a form that was refused.
  const isStill = document.getElementById("main").hasAttribute("data-still");
  if (!paused && !isStill && document.visibilityState === "visible") timer = setTimeout(update, wait);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && !paused) update();
  else clearTimeout(timer);
});

// -- asking before a change ---------------------------------------------------------------------------------------------

document.addEventListener("submit", (event) => {
  const asks = event.target.dataset.asks;
  if (asks && !window.confirm(asks)) event.preventDefault();
});

// -- the keyboard -------------------------------------------------------------------------------------------------------

const PLACES = { f: "", a: "/actions", r: "/runs", o: "/coordination" };
const KEYS = "g f, g a, g r, g o: fleet, actions, runs, coordination\nj, k: the next and the previous row\n/: the first filter\np: pause the updates\n?: this help";
let first = "";

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (first === "g" && event.key in PLACES) {
    location.href = document.querySelector(".brand").getAttribute("href") + PLACES[event.key];
  } else if (event.key === "?") {
    window.alert(KEYS);
  } else if (event.key === "/") {
    event.preventDefault();
    document.querySelector("main select, main input:not([type=hidden])")?.focus();
  } else if (event.key === "p") {
    paused = !paused;
    say(paused ? "updates are paused" : "");
    plan();
  } else if (event.key === "j" || event.key === "k") {
    move(event.key === "j" ? 1 : -1);
  }
  first = event.key === "g" ? "g" : "";
});

function move(step) {
  const links = [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a")).filter(Boolean);
  const at = links.indexOf(document.activeElement);
  links[Math.max(0, Math.min(links.length - 1, at + step))]?.focus();
}

plan();
