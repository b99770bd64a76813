// Brings the page up to date: fetches it again every two seconds while it is visible, and changes what is different, in
// place. Focus, scroll position, what a viewer has typed and what a viewer has opened stay: the browser keeps the value of
// a field in which a viewer has typed, whatever its attributes become. Without this script every page works as well.
"use strict";

const EVERY = 2000;
const LONGEST = 30000;
// While the instance says what is new, for the times and bars that move by themselves.
const LISTENING = 10000;
let paused = false;
let wait = EVERY;
let failures = 0;
let updating = false;
let again = false;
let events = null;
let deafUntil = 0;
let others = otherPorts(document);
let timer;

const status = document.getElementById("updates");

function say(text) {
  if (status.textContent !== text) status.textContent = text;
}

// -- changing what is different -----------------------------------------------------------------------------------------

// An element with another id is another thing: what a viewer has typed for one lock must not become the text of the next.
function merge(present, next) {
  if (present.nodeType !== next.nodeType || present.nodeName !== next.nodeName || present.id !== next.id) {
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

// Open and close the details of the next page as the viewer has. They are the same ones if they have the same id: a new
// one may come before them.
function keepOpen(next) {
  for (const details of next.querySelectorAll("details[id]")) {
    const present = document.getElementById(details.id);
    if (present) details.open = present.open;
  }
}

// -- fetching -----------------------------------------------------------------------------------------------------------

async function update() {
  clearTimeout(timer);
  if (updating) {
    again = true;
    return;
  }
  updating = true;
  again = false;
  await fetchAndMerge();
  updating = false;
  if (again) update();
  else plan();
}

async function fetchAndMerge() {
  try {
    const answer = await fetch(location.href, { headers: { accept: "text/html" }, redirect: "manual" });
    if (answer.type === "opaqueredirect") return location.reload();
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const next = page.getElementById("main");
    if (!next) throw new Error("no page");
    // This page is an error, and the error is over.
    if (!document.querySelector("nav") && page.querySelector("nav")) return location.reload();
    others = otherPorts(page);
    if (page.getElementById("draining") && moveOn()) return;
    keepOpen(next);
    if (!selecting()) merge(document.getElementById("main"), next);
    wait = EVERY;
    failures = 0;
    say("");
  } catch {
    failures += 1;
    if (failures > 1 && moveOn()) return;
    wait = Math.min(2 * wait, LONGEST);
    say("no answer; this page is not up to date");
  }
}

// The ports of the other instances on this host, if the browser talks to an instance directly. Behind a load balancer
// there are none, and need not be: the next request goes to a living instance.
function otherPorts(page) {
  return (page.body.dataset.otherPorts ?? "").split(" ").filter(Boolean);
}

// Show the same page of another instance, because this one drains or does not answer.
function moveOn() {
  if (others.length === 0) return false;
  location.port = others[Math.floor(Math.random() * others.length)];
  return true;
}

// The viewer marks text: replacing it would end that.
function selecting() {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed;
}

// The page of a run that has not ended: the instance says when the run has new events.
function listen(address) {
  if (!address) {
    events?.close();
    events = null;
  } else if (!events && Date.now() > deafUntil) {
    events = new EventSource(address);
    events.onmessage = update;
    events.onerror = () => {
      events?.close();
      events = null;
      deafUntil = Date.now() + LONGEST;
    };
  }
}

function plan() {
  clearTimeout(timer);
  const main = document.getElementById("main");
  // The sign-in, and a form that was refused.
  const isStill = main.hasAttribute("data-still");
  const isWatched = !paused && !isStill && document.visibilityState === "visible";
  listen(isWatched ? main.dataset.events : undefined);
  if (isWatched) timer = setTimeout(update, events ? Math.max(wait, LISTENING) : wait);
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible" && !paused) update();
  else plan();
});

function pauseOrResume() {
  paused = !paused;
  pauseButton.textContent = paused ? "Resume updates" : "Pause updates";
  say(paused ? "updates are paused" : "");
  plan();
}

// Made here: without this script there are no updates.
const pauseButton = document.createElement("button");
pauseButton.type = "button";
pauseButton.textContent = "Pause updates";
pauseButton.addEventListener("click", pauseOrResume);
document.querySelector("footer").append(pauseButton);

// -- asking before a change ---------------------------------------------------------------------------------------------

document.addEventListener("submit", (event) => {
  const asks = event.target.dataset.asks;
  if (asks && !window.confirm(asks)) event.preventDefault();
});

// -- the keyboard -------------------------------------------------------------------------------------------------------

const PLACES = { f: "", a: "/actions", r: "/runs", e: "/errors", o: "/coordination", c: "/charts" };
const KEYS = "g f, g a, g r, g e, g o, g c: fleet, actions, runs, errors, coordination, charts\nj, k: the next and the previous row\n/: the first filter\np: pause the updates\n?: this help";
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
    pauseOrResume();
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
