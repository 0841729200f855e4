// The one clock of all replays: each frame moves every run on, and draws one chart.

const playing = new Map(); // run -> the time of its last frame
let next = 0;
let isScheduled = false;

export function play(run) {
  run.setPlaying(true);
  playing.set(run, null);
  schedule();
}

export function stop(run) {
  playing.delete(run);
  run.setPlaying(false);
}

function schedule() {
  if (!isScheduled) requestAnimationFrame(frame);
  isScheduled = true;
}

function frame(now) {
  isScheduled = false;
  for (const [run, last] of playing) {
    playing.set(run, now);
    if (last === null) continue;
    run.show(run.clockMs + (now - last) * run.speed);
  }
  drawOne();
  for (const run of [...playing.keys()]) if (run.clockMs >= run.durationMs && !isBehind(run)) stop(run);
  if (playing.size) schedule();
}

// Draws the next chart that is behind its text, so that no frame pays for all of them.
function drawOne() {
  const lanes = [...playing.keys()].flatMap((run) => run.lanes);
  for (let tried = 0; tried < lanes.length; tried++) {
    const lane = lanes[next++ % lanes.length];
    if (lane.chart.draw(lane.numShown)) return;
  }
}

function isBehind(run) {
  return run.lanes.some((lane) => lane.chart.isBehind);
}
