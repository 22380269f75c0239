// Sends requests to the service, and repeats them while it is busy or there is no connection.

import { storage } from "./storage.js";

const KEY = "nmt-token";
const TAB = storage("sessionStorage");
const LONGEST_WAIT = 30; // seconds between attempts
const BUSY = new Set([429, 503]);

export class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// Stores the token for this tab; an empty token removes it. It is not kept in the address, because users share the address.
export function keepToken(token) {
  if (token) TAB.set(KEY, token);
  else TAB.remove(KEY);
}

export const get = (path, options) => request(path, undefined, options);
export const post = (path, body, options) => request(path, body, options);

// Sends a request until it is answered. Before each pause, calls `waiting(text)` with the reason and the seconds until the next
// attempt, and after it `waiting("")`. Throws ServiceError if the service refuses the request, or the reason of `signal` once it
// is aborted.
async function request(path, body, { signal, waiting = () => {} } = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const answer = await once(path, body, signal);
    if (answer.value) return answer.value;
    const seconds = Math.min(LONGEST_WAIT, answer.wait ?? 2 ** attempt);
    waiting(`${answer.error} Trying again in ${seconds} s.`);
    await pause(seconds, signal, !answer.wait);
    waiting("");
  }
}

// Sends a request once. Returns { value }, or { error, wait } if it should be repeated: `wait` is the number of seconds that the
// service asks for, and undefined if there is no connection. Throws as `request`.
async function once(path, body, signal) {
  const token = TAB.get(KEY);
  const headers = { Accept: "application/json", ...(token && { Authorization: `Bearer ${token}` }) };
  const sent = body && { method: "POST", body: JSON.stringify(body) };
  if (body) headers["Content-Type"] = "application/json";
  let response;
  let text;
  try {
    response = await fetch(path, { ...sent, headers, signal, cache: "no-store", credentials: "omit" });
    text = await response.text();
  } catch (error) {
    if (signal?.aborted) throw error;
    return { error: "No connection to the service." };
  }
  const value = parsed(text);
  if (response.ok && value) return { value };
  const error = value?.error ?? `The service answered with status ${response.status}.`;
  if (BUSY.has(response.status)) return { error: ended(error), wait: secondsOf(response.headers.get("Retry-After")) };
  throw new ServiceError(error, response.status);
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const ended = (sentence) => (/[.!?]$/.test(sentence) ? sentence : `${sentence}.`);

// Returns the seconds to wait from a header Retry-After, which holds seconds or a date.
function secondsOf(header) {
  const seconds = /^\s*\d+\s*$/.test(header ?? "") ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(1, Math.ceil(seconds)) : 1;
}

// Waits for some seconds; with `forNetwork`, only until the browser is online again.
function pause(seconds, signal, forNetwork) {
  return new Promise((resolve, reject) => {
    const finish = (settle) => (reason) => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
      removeEventListener("online", online);
      settle(reason);
    };
    const online = finish(resolve);
    const abort = finish(() => reject(signal.reason));
    const timer = setTimeout(online, 1000 * seconds);
    signal?.addEventListener("abort", abort);
    if (forNetwork) addEventListener("online", online);
    if (signal?.aborted) abort();
  });
}

// Runs requests for one place of the page. A newer request aborts an older one, whose answer is no longer wanted.
export class Latest {
  #controller = null;

  get busy() {
    return this.#controller !== null;
  }

  cancel() {
    this.#controller?.abort();
    this.#controller = null;
  }

  // Runs `task(signal)` and returns its result, or undefined if a newer task or `cancel` has aborted it.
  async run(task) {
    this.cancel();
    const controller = new AbortController();
    this.#controller = controller;
    try {
      const result = await task(controller.signal);
      return controller.signal.aborted ? undefined : result;
    } catch (error) {
      if (controller.signal.aborted) return undefined;
      throw error;
    } finally {
      if (this.#controller === controller) this.#controller = null;
    }
  }
}
