// Remembers texts in the browser. A browser that blocks site data forgets them when the page is closed.

// Returns { get(key), set(key, value), remove(key) } for "localStorage" or "sessionStorage".
export function storage(kind) {
  const kept = new Map();
  const attempt = (action, otherwise) => {
    try {
      return action(window[kind]);
    } catch {
      return otherwise();
    }
  };
  return {
    get: (key) => attempt((store) => store.getItem(key), () => kept.get(key) ?? null),
    set: (key, value) => attempt((store) => store.setItem(key, value), () => kept.set(key, value)),
    remove: (key) => attempt((store) => store.removeItem(key), () => kept.delete(key)),
  };
}
