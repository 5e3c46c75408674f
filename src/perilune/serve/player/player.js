// Sends the text to /v1/audio/speech and plays the samples as they arrive.
"use strict";

const byId = (name) => document.getElementById(name);
let stopped = null; // the controller of the utterance in progress
let served = null; // the answer of /v1/audio/voices

function headers() {
  const token = byId("token").value;
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function loadVoices() {
  const answer = await fetch("/v1/audio/voices", { headers: headers() });
  if (answer.status === 401) {
    byId("token-row").hidden = false;
    byId("status").textContent = "This server needs a token.";
    return;
  }
  served = await answer.json();
  for (const [name, values] of [["voice", served.voices], ["language", served.languages]]) {
    byId(name).replaceChildren(...values.map((value) => new Option(value, value)));
  }
  byId("status").textContent = `Model ${served.model}, ${served.sample_rate} samples a second.`;
}

// Schedules samples one after the other and counts the gaps.
class Player {
  constructor(rate) {
    this.rate = rate;
    this.context = new AudioContext({ sampleRate: rate });
    this.until = 0; // time of the context at which all samples so far have been played
    this.samples = 0;
    this.underruns = 0;
    this.peaks = [];
  }

  play(samples) {
    const now = this.context.currentTime;
    if (this.until < now) {
      this.underruns += this.samples > 0 ? 1 : 0;
      this.until = now + 0.02;
    }
    const buffer = this.context.createBuffer(1, samples.length, this.rate);
    buffer.copyToChannel(samples, 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.context.destination);
    source.start(this.until);
    this.until += samples.length / this.rate;
    this.samples += samples.length;
    this.peaks.push(samples.reduce((most, one) => Math.max(most, Math.abs(one)), 0));
  }
}

function draw(peaks) {
  const canvas = byId("wave");
  const pen = canvas.getContext("2d");
  const half = canvas.height / 2;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.fillStyle = getComputedStyle(document.body).color;
  const width = Math.min(8, canvas.width / Math.max(peaks.length, 1));
  peaks.forEach((peak, i) => pen.fillRect(i * width, half - peak * half, width * 0.8, 1 + 2 * peak * half));
}

function show(player, began, firstAt) {
  const seconds = player.samples / player.rate;
  byId("times").hidden = false;
  byId("first").textContent = `${Math.round(firstAt - began)} ms`;
  byId("length").textContent = `${seconds.toFixed(2)} s`;
  byId("factor").textContent = ((performance.now() - began) / 1000 / seconds).toFixed(2);
  byId("underruns").textContent = String(player.underruns);
  draw(player.peaks);
}

async function errorOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `status ${answer.status}`;
  }
}

async function speak() {
  const began = performance.now();
  const body = {
    model: served.model,
    input: byId("text").value,
    voice: byId("voice").value,
    language: byId("language").value,
    response_format: "pcm",
  };
  if (byId("seed").value !== "") body.seed = Number(byId("seed").value);
  const player = new Player(served.sample_rate);
  const answer = await fetch("/v1/audio/speech", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(body),
    signal: stopped.signal,
  });
  if (!answer.ok) throw new Error(await errorOf(answer));
  const reader = answer.body.getReader();
  let firstAt = 0;
  let rest = new Uint8Array(0); // a piece may end inside a sample
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    firstAt = firstAt || performance.now();
    const bytes = new Uint8Array(rest.length + value.length);
    bytes.set(rest);
    bytes.set(value, rest.length);
    const whole = bytes.length - (bytes.length % 2);
    rest = bytes.slice(whole);
    if (!whole) continue;
    const view = new DataView(bytes.buffer, 0, whole);
    const samples = Float32Array.from({ length: whole / 2 }, (_, i) => view.getInt16(2 * i, true) / 32768);
    player.play(samples);
    show(player, began, firstAt);
  }
  byId("status").textContent = "Complete.";
  return player;
}

byId("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (stopped) return;
  stopped = new AbortController();
  byId("speak").disabled = true;
  byId("stop").disabled = false;
  byId("status").textContent = "Speaking …";
  try {
    if (!served) await loadVoices();
    if (served) await speak();
  } catch (error) {
    byId("status").textContent = stopped.signal.aborted ? "Stopped." : `Failed: ${error.message}`;
  } finally {
    stopped = null;
    byId("speak").disabled = false;
    byId("stop").disabled = true;
  }
});
byId("stop").addEventListener("click", () => stopped && stopped.abort());
byId("token").addEventListener("change", loadVoices);
loadVoices().catch((error) => (byId("status").textContent = `Failed: ${error.message}`));
