// Requests of this page. The token stays in this tab: it is in no request that a browser makes by itself.

const KEY = "varuna-token";
const SILENCE_MS = 25000; // the server sends something every 10 s
const RETRY_MS = [500, 1000, 2000, 5000];

const pauseAfter = (failures) => new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));

export function takeToken() {
  if (location.hash.length > 20) {
    sessionStorage.setItem(KEY, location.hash.slice(1));
    history.replaceState(null, "", "/");
  }
  return sessionStorage.getItem(KEY);
}

async function request(path, options = {}) {
  const response = await fetch(path, {
    ...options,
    cache: "no-store",
    headers: { Authorization: `Bearer ${sessionStorage.getItem(KEY)}` },
  });
  if (!response.ok) throw Object.assign(new Error(`status ${response.status}`), { status: response.status });
  return response;
}

export async function get(path, parameters = {}) {
  const known = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(known);
  return (await request(`${path}?${query}`, { signal: AbortSignal.timeout(SILENCE_MS) })).json();
}

// Return a function that gets the newest version and calls `load` for it: one call at a time, repeated until
// it succeeds. Versions that are outdated by then are left out.
export function loader(load) {
  let wanted = null;
  let loaded = null;
  let busy = false;
  return async (version) => {
    wanted = version;
    if (busy) return;
    busy = true;
    for (let failures = 0; loaded !== wanted; ) {
      const next = wanted;
      try {
        await load();
        loaded = next;
        failures = 0;
      } catch {
        await pauseAfter(failures);
        failures += 1;
      }
    }
    busy = false;
  };
}

// Resolve as soon as this tab can be seen.
const seen = () =>
  new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });

// Call `onUpdate` with every update, and `onLost` when the server does not answer. Never ends.
// A hidden tab keeps no connection: browsers open only six to one server, for all tabs together.
export async function follow(onUpdate, onLost) {
  for (let failures = 0; ; failures += 1) {
    await seen();
    try {
      await readStream((update) => {
        failures = 0;
        onUpdate(update);
      });
      onLost(null);
    } catch (error) {
      if (document.hidden) failures = 0;
      else onLost(error);
    }
    await pauseAfter(failures);
  }
}

async function readStream(onUpdate) {
  const abort = new AbortController();
  const hide = () => document.hidden && abort.abort();
  document.addEventListener("visibilitychange", hide);
  let timer = setTimeout(() => abort.abort(), SILENCE_MS);
  try {
    const response = await request("/api/stream", { signal: abort.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let text = ""; ; ) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => abort.abort(), SILENCE_MS);
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) onUpdate(JSON.parse(part.slice(6)));
    }
  } finally {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", hide);
  }
}
