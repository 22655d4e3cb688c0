//! What of a paper's findings holds here.

use crate::catalogue::Item;
use crate::figures::Found;

/// Of one finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Holds,
    DoesNot,
    /// A point that it is about was not measured.
    Open,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Verdict::Holds => "holds here",
            Verdict::DoesNot => "does not hold here",
            Verdict::Open => "not measured here",
        }
    }
}

/// The verdicts on an item's findings, in their order.
pub(crate) fn verdicts(item: &Item, found: &[Found]) -> Vec<Verdict> {
    let ours = |label: &str| found.iter().find(|found| found.point.label == label)?.ours;
    let verdict = |holds: Option<bool>| match holds {
        Some(true) => Verdict::Holds,
        Some(false) => Verdict::DoesNot,
        None => Verdict::Open,
    };
    item.findings.iter().map(|finding| verdict((finding.holds)(&ours))).collect()
}

/// Prints an item's values, theirs beside ours, and a line for each finding.
pub(crate) fn print(item: &Item, found: &[Found]) {
    println!("  {:<52} {:>10} {:>10}  unit", "", "the paper", "here");
    for Found { point, theirs, ours } in found {
        let (theirs, ours) = (number(*theirs), number(*ours));
        println!("  {:<52} {theirs:>10} {ours:>10}  {}", point.label, point.unit);
    }
    for (finding, verdict) in item.findings.iter().zip(verdicts(item, found)) {
        println!("{}: {}", verdict.text(), finding.text);
    }
}

/// Three significant digits.
pub(crate) fn number(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value.abs() >= 99.95 => format!("{value:.0}"),
        Some(value) if value.abs() >= 9.995 => format!("{value:.1}"),
        Some(value) => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::CATALOGUE;

    #[test]
    fn a_finding_holds_or_not_by_our_values_and_is_open_without_them() {
        let item = CATALOGUE.iter().find(|item| item.name() == "figure 2 cooperative");
        let item = item.expect("is there");
        let with = |values: &[Option<f64>]| {
            let points = item.points.iter().zip(values);
            let found: Vec<_> =
                points.map(|(point, ours)| Found { point, theirs: None, ours: *ours }).collect();
            verdicts(item, &found)
        };
        let values = [Some(1.9), Some(0.95), Some(1.7), Some(50.0), Some(1.0)];
        assert!(with(&values).iter().all(|verdict| *verdict == Verdict::Holds));
        assert_eq!(with(&[Some(0.9), Some(0.95), None, None, None])[0], Verdict::DoesNot);
        assert!(with(&[None; 5]).iter().all(|verdict| *verdict == Verdict::Open));
    }
}
