// Server-sent events of a request with a body and a key in a header: EventSource can send neither.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Yields [name, data] of each event. Throws Refused for every status but 200.
export async function* events(path, body, key, signal) {
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  const response = await fetch(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  if (!response.ok) throw new Refused(response.status, await problem(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) if (!part.startsWith(":")) yield parsed(part); // else a comment
  }
}

export function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the worker answered ${response.status}`;
  }
}

function parsed(part) {
  const [name, data] = part.split("\n");
  return [name.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
}
