//! How checks print: as a table for people, as JSON for programs.

use crate::checks::{Check, Verdict};
use serde_json::{Value, json};
use std::fmt::Write;

const BOLD: &str = "1";
const DIM: &str = "2";

/// Renders checks as lines: verdict, name and finding, then what it means and what repairs it.
pub(crate) fn table(checks: &[Check], colour: bool) -> String {
    let paint = |code: &str, text: &str| {
        if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    };
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let indent = " ".repeat("PASS  ".len() + width + 2);
    let mut text = String::new();
    for check in checks {
        let (word, code) = style(check.verdict);
        let name = paint(BOLD, &format!("{:width$}", check.name));
        text += &format!("{}  {name}  {}\n", paint(code, word), check.found);
        for meaning in &check.meaning {
            text += &format!("{indent}{meaning}\n");
        }
        for repair in &check.repairs {
            text += &format!("{indent}{} {}\n", paint(DIM, &repair.when), repair.command);
        }
    }
    let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
    let (pass, warn, fail) = (count(Verdict::Pass), count(Verdict::Warn), count(Verdict::Fail));
    let summary = match (fail, warn) {
        (0, 0) => "farheap will run here",
        (0, _) => "farheap will run here, with the limitations above",
        _ => "farheap will not run here as configured",
    };
    let plural = if warn == 1 { "" } else { "s" };
    writeln!(text, "\n{pass} passed, {warn} warning{plural}, {fail} failed: {summary}")
        .expect("a string takes any text");
    text
}

/// Renders checks as one JSON object: `verdict` of all, then `checks` in order.
pub(crate) fn json(checks: &[Check]) -> Value {
    let list: Vec<Value> = checks
        .iter()
        .map(|check| {
            let repairs: Vec<Value> = check
                .repairs
                .iter()
                .map(|repair| json!({ "when": repair.when, "command": repair.command }))
                .collect();
            json!({
                "name": check.name,
                "verdict": style(check.verdict).0,
                "found": check.found,
                "meaning": check.meaning,
                "repairs": repairs,
            })
        })
        .collect();
    let worst = checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Pass);
    json!({ "version": env!("CARGO_PKG_VERSION"), "verdict": style(worst).0, "checks": list })
}

/// Word and colour of a verdict.
fn style(verdict: Verdict) -> (&'static str, &'static str) {
    match verdict {
        Verdict::Pass => ("PASS", "32"),
        Verdict::Warn => ("WARN", "33"),
        Verdict::Fail => ("FAIL", "31"),
    }
}
