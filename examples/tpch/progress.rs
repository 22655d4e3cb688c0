//! Progress of loading: a bar on a terminal, a line now and then elsewhere.
//!
//! Loading threads call [`Progress::add`]; the thread that crosses the interval draws. Knows nothing of
//! tables; the caller says by a closure what to show besides the rows.

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use std::fmt;
use std::io::IsTerminal;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Between two draws of the bar's note.
const NOTE_INTERVAL: Duration = Duration::from_millis(200);
/// Between two lines when standard error is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Where progress is shown.
enum Sink {
    Bar(ProgressBar),
    Lines,
    Nowhere,
}

/// Rows done of rows to do, shared by all loading threads.
pub(crate) struct Progress<'a> {
    sink: Sink,
    label: &'a str,
    rows: u64,
    done: AtomicU64,
    started: Instant,
    shown: Mutex<Instant>,
    note: &'a (dyn Fn() -> String + Sync),
}

impl<'a> Progress<'a> {
    /// Shows progress on standard error; `note` is asked for more to show, a few times a second.
    pub(crate) fn new(label: &'a str, rows: u64, note: &'a (dyn Fn() -> String + Sync)) -> Self {
        let sink =
            if std::io::stderr().is_terminal() { Sink::Bar(bar(label, rows)) } else { Sink::Lines };
        Progress::with_sink(sink, label, rows, note)
    }

    /// Shows nothing.
    pub(crate) fn hidden() -> Self {
        Progress::with_sink(Sink::Nowhere, "", 0, &String::new)
    }

    fn with_sink(
        sink: Sink,
        label: &'a str,
        rows: u64,
        note: &'a (dyn Fn() -> String + Sync),
    ) -> Self {
        let now = Instant::now();
        let (done, shown) = (AtomicU64::new(0), Mutex::new(now));
        Progress { sink, label, rows, done, started: now, shown, note }
    }

    /// Counts `rows` more as done.
    pub(crate) fn add(&self, rows: u64) {
        // Relaxed: a display needs no order with anything else.
        let done = self.done.fetch_add(rows, Relaxed) + rows;
        match &self.sink {
            Sink::Bar(bar) => {
                bar.set_position(done);
                if self.is_due(NOTE_INTERVAL) {
                    bar.set_message((self.note)());
                }
            }
            Sink::Lines if self.is_due(LINE_INTERVAL) => self.print_line(done),
            Sink::Lines | Sink::Nowhere => {}
        }
    }

    /// Shows the end and returns the time since the start.
    pub(crate) fn finish(self) -> Duration {
        let elapsed = self.started.elapsed();
        match &self.sink {
            Sink::Bar(bar) => bar.finish_with_message((self.note)()),
            Sink::Lines => self.print_line(self.done.load(Relaxed)),
            Sink::Nowhere => {}
        }
        elapsed
    }

    /// Whether `interval` has passed since something was shown; at most one thread hears yes.
    fn is_due(&self, interval: Duration) -> bool {
        let Ok(mut shown) = self.shown.try_lock() else { return false };
        let due = shown.elapsed() >= interval;
        if due {
            *shown = Instant::now();
        }
        due
    }

    fn print_line(&self, done: u64) {
        let percent = 100 * done / self.rows.max(1);
        let seconds = self.started.elapsed().as_secs_f64();
        let note = (self.note)();
        eprintln!("{}: {percent:3} % of {} rows, {seconds:.1} s{note}", self.label, self.rows);
    }
}

/// A bar with rows per second and time left, about 90 columns wide.
fn bar(label: &str, rows: u64) -> ProgressBar {
    let rate = |state: &ProgressState, text: &mut dyn fmt::Write| {
        // Nowhere to report a failure to; the rate is then missing from the line.
        let _ = write!(text, "{:.1} M rows/s", state.per_sec() / 1e6);
    };
    let style =
        ProgressStyle::with_template("{prefix} {bar:20} {percent:>3} % {rate}, {eta} left{msg}")
            .expect("the template is well-formed")
            .with_key("rate", rate);
    ProgressBar::new(rows).with_style(style).with_prefix(label.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_all_threads_add_up() {
        let progress = Progress::hidden();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..100).for_each(|_| progress.add(3)));
            }
        });
        assert_eq!(progress.done.load(Relaxed), 1_200);
    }

    #[test]
    fn one_interval_is_due_once() {
        let progress = Progress::hidden();
        assert!(progress.is_due(Duration::ZERO));
        assert!(!progress.is_due(Duration::from_secs(3_600)));
    }
}
