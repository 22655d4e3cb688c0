//! Which of a paper's findings hold here, and whether that is decided.
//!
//! The rule, for all findings: a benchmark runs in rounds, and each of its rows is a value beside its baseline from the
//! same round. Rounds are drawn again with replacement, as many as there are, [`RESAMPLES`] times (the bootstrap of the
//! paired values), and the finding is looked at by the medians of each draw. It holds where it does in 97.5 of a hundred
//! draws, and does not where it does in at most 2.5: the condition is on one side of the 95 % interval of the medians. That
//! something does not change fails only where the whole interval of a change is outside of what counts as none.
//! Between these it is not decided, and another round is run, until it is or the time is used up. What takes time
//! needs [`ROUNDS_MIN`] rounds, of which fewer would agree by chance too often; what is counted needs one.

use crate::catalogue::{Evidence, Finding, Item};
use crate::figures::Found;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Of six rounds that favour either side by chance, all agree in three of a hundred cases.
pub(crate) const ROUNDS_MIN: usize = 6;
const RESAMPLES: usize = 2000;
/// Part of the draws that has to agree.
const AGREE: f64 = 0.975;

/// Of one finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Holds,
    DoesNot,
    /// Neither by the rounds so far.
    Undecided,
    /// A point that it is about was not measured.
    Open,
}

impl Verdict {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Verdict::Holds => "holds here",
            Verdict::DoesNot => "does not hold here",
            Verdict::Undecided => "not decided here",
            Verdict::Open => "not measured here",
        }
    }
}

/// A verdict, and the part of the draws in which the finding holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decision {
    pub(crate) verdict: Verdict,
    pub(crate) share: f64,
}

/// The decisions on an item's findings, in their order.
pub(crate) fn decisions(item: &Item, rounds: &[Vec<Found>]) -> Vec<Decision> {
    item.findings.iter().map(|finding| decide(finding, item, rounds)).collect()
}

fn decide(finding: &Finding, item: &Item, rounds: &[Vec<Found>]) -> Decision {
    let holds = |rounds: &[&Vec<Found>]| {
        let ours = |label: &str| {
            let at = item.points.iter().position(|point| point.label == label)?;
            median(rounds.iter().filter_map(|round| round[at].ours))
        };
        (finding.holds)(&ours)
    };
    let all: Vec<&Vec<Found>> = rounds.iter().collect();
    if holds(&all).is_none() {
        return Decision { verdict: Verdict::Open, share: 0.0 };
    }
    let draws: Vec<bool> = draws(rounds).filter_map(|draw| holds(&draw)).collect();
    let share = draws.iter().filter(|holds| **holds).count() as f64 / draws.len().max(1) as f64;
    let least = match finding.by {
        Evidence::Counts => 1,
        Evidence::Times | Evidence::NoChange => ROUNDS_MIN,
    };
    // Some rounds may lack a row: skipped, or of a benchmark that had another name for it.
    let measured = all.iter().filter(|round| holds(std::slice::from_ref(round)).is_some()).count();
    let verdict = match share {
        _ if measured < least => Verdict::Undecided,
        share if share >= AGREE => Verdict::Holds,
        share if share <= 1.0 - AGREE && !may_be_none(finding, item, rounds) => Verdict::DoesNot,
        _ => Verdict::Undecided,
    };
    Decision { verdict, share }
}

/// True of a finding about changes that are none, if it holds for those of each interval that are nearest to none: medians
/// that scatter widely miss a narrow band on both sides, which says nothing.
fn may_be_none(finding: &Finding, item: &Item, rounds: &[Vec<Found>]) -> bool {
    let nearest = |label: &str| {
        let at = item.points.iter().position(|point| point.label == label)?;
        interval(rounds, at).map(|(low, _, high)| 0.0_f64.clamp(low, high))
    };
    finding.by == Evidence::NoChange && (finding.holds)(&nearest) == Some(true)
}

/// Rounds drawn with replacement; the same ones whenever there are as many.
fn draws(rounds: &[Vec<Found>]) -> impl Iterator<Item = Vec<&Vec<Found>>> {
    let mut dice = StdRng::seed_from_u64(rounds.len() as u64);
    (0..RESAMPLES).map(move |_| {
        (0..rounds.len()).map(|_| &rounds[dice.random_range(0..rounds.len())]).collect()
    })
}

/// The median of our values of a point, and its 95 % interval.
pub(crate) fn interval(rounds: &[Vec<Found>], point: usize) -> Option<(f64, f64, f64)> {
    let ours = |rounds: &mut dyn Iterator<Item = &Vec<Found>>| {
        median(rounds.filter_map(|round| round[point].ours))
    };
    let here = ours(&mut rounds.iter())?;
    let mut medians: Vec<f64> =
        draws(rounds).filter_map(|draw| ours(&mut draw.into_iter())).collect();
    medians.sort_by(f64::total_cmp);
    let last = medians.len().checked_sub(1)?;
    let at = |part: f64| medians[(part * last as f64).round() as usize];
    Some((at(1.0 - AGREE), here, at(AGREE)))
}

/// The median; of an even number, the mean of the two in the middle.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let last = values.len().checked_sub(1)?;
    Some(f64::midpoint(values[last / 2], values[last.div_ceil(2)]))
}

/// Prints an item's values, theirs beside ours, and a line for each finding.
pub(crate) fn print(item: &Item, rounds: &[Vec<Found>]) {
    println!("  {:<52} {:>10} {:>10}  95 % interval, unit", "", "the paper", "here");
    for (at, point) in item.points.iter().enumerate() {
        let theirs = median(rounds.iter().filter_map(|round| round[at].theirs));
        let ours = interval(rounds, at);
        let (theirs, here) = (number(theirs), number(ours.map(|(_, here, _)| here)));
        let between = match ours.filter(|_| rounds.len() > 1) {
            Some((low, _, high)) => format!("{} to {} ", number(Some(low)), number(Some(high))),
            None => String::new(),
        };
        println!("  {:<52} {theirs:>10} {here:>10}  {between}{}", point.label, point.unit);
    }
    for (finding, decision) in item.findings.iter().zip(decisions(item, rounds)) {
        println!("{}", sentence(finding, decision, rounds.len()));
    }
}

fn sentence(finding: &Finding, decision: Decision, rounds: usize) -> String {
    let Decision { verdict, share } = decision;
    let begin = format!("{}: {}", verdict.text(), finding.text);
    match verdict {
        Verdict::Undecided => format!(
            "{begin} (in {:.0} % of the draws from {rounds} rounds; it needs {})",
            100.0 * share,
            finding.needs.unwrap_or("more rounds, or a quieter machine"),
        ),
        Verdict::Open => match finding.needs {
            Some(needs) => format!("{begin} (it needs {needs})"),
            None => begin,
        },
        _ => begin,
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

    fn item(name: &str) -> &'static Item {
        CATALOGUE.iter().find(|item| item.name() == name).expect("is there")
    }

    fn round(item: &'static Item, values: &[Option<f64>]) -> Vec<Found> {
        let points = item.points.iter().zip(values);
        points.map(|(point, ours)| Found { point, theirs: None, ours: *ours }).collect()
    }

    fn of(item: &'static Item, rounds: &[Vec<Found>]) -> Vec<Verdict> {
        decisions(item, rounds).iter().map(|decision| decision.verdict).collect()
    }

    #[test]
    fn times_need_rounds_that_agree() {
        let item = item("figure 2 cooperative");
        let [good, bad] = [1.9, 0.9]
            .map(|first| round(item, &[Some(first), Some(0.95), Some(1.7), Some(50.0), Some(1.0)]));
        let rounds = |good_ones: usize, bad_ones: usize| {
            [vec![good.clone(); good_ones], vec![bad.clone(); bad_ones]].concat()
        };
        assert_eq!(of(item, &rounds(5, 0))[0], Verdict::Undecided, "too few");
        assert!(of(item, &rounds(6, 0)).iter().all(|one| *one == Verdict::Holds));
        assert_eq!(of(item, &rounds(0, 6))[0], Verdict::DoesNot);
        let split = decisions(item, &rounds(5, 4))[0];
        assert_eq!(split.verdict, Verdict::Undecided);
        assert!((0.5..0.9).contains(&split.share), "{}", split.share);
        assert_eq!(of(item, &rounds(30, 3))[0], Verdict::Holds, "a few strays do not matter");
        let mut unmeasured = vec![round(item, &[None; 5]); 9];
        assert!(of(item, &unmeasured).iter().all(|one| *one == Verdict::Open));
        unmeasured.push(good);
        assert_eq!(of(item, &unmeasured)[0], Verdict::Undecided, "one of ten has it");
    }

    #[test]
    fn counts_need_one_round() {
        let item = item("figure 6 metadata");
        assert_eq!(of(item, &[round(item, &[Some(0.4)])]), [Verdict::Holds]);
        assert_eq!(of(item, &[round(item, &[Some(1.4)])]), [Verdict::DoesNot]);
    }

    #[test]
    fn changes_that_scatter_around_none_are_not_decided() {
        let item = item("figure 9 metadata");
        let rounds = |changes: [f64; 6]| -> Vec<Vec<Found>> {
            changes.iter().map(|change| round(item, &[Some(*change), Some(0.0)])).collect()
        };
        let scattered = [-9.0, -8.0, -7.0, 7.0, 8.0, 9.0];
        assert_eq!(of(item, &rounds(scattered)), [Verdict::Undecided]);
        assert_eq!(of(item, &rounds([7.0, 8.0, 9.0, 7.5, 8.5, 9.5])), [Verdict::DoesNot]);
        assert_eq!(of(item, &rounds([0.1, -0.2, 0.3, 0.0, 0.2, -0.1])), [Verdict::Holds]);
    }

    #[test]
    fn what_is_not_decided_names_what_it_needs() {
        let finding = item("figure 9 metadata").findings.first().expect("one");
        let undecided = Decision { verdict: Verdict::Undecided, share: 0.42 };
        let text = sentence(finding, undecided, 8);
        assert!(
            text.contains("42 % of the draws from 8 rounds; it needs two memory nodes"),
            "{text}"
        );
    }

    #[test]
    fn what_no_row_here_decides_names_the_hardware() {
        let item = item("figure 7 query");
        let [alike, sockets] = item.findings else { panic!("two findings") };
        let rounds = vec![round(item, &[Some(1.0), Some(1.1), Some(0.9), Some(1.0), None]); 6];
        let decisions = decisions(item, &rounds);
        assert_eq!(decisions[0].verdict, Verdict::Holds, "{}", alike.text);
        let text = sentence(sockets, decisions[1], 6);
        assert!(text.starts_with("not measured") && text.ends_with("four sockets, as theirs)"));
    }

    #[test]
    fn an_interval_contains_the_median_and_shrinks_with_rounds_that_agree() {
        let item = item("figure 6 metadata");
        let rounds = |values: &[f64]| -> Vec<Vec<Found>> {
            values.iter().map(|value| round(item, &[Some(*value)])).collect()
        };
        let (low, here, high) = interval(&rounds(&[1.0, 2.0, 3.0, 4.0, 5.0]), 0).expect("measured");
        assert!(here == 3.0 && (1.0..3.0).contains(&low) && high > 3.0 && high <= 5.0);
        assert_eq!(interval(&rounds(&[2.0; 7]), 0), Some((2.0, 2.0, 2.0)));
        assert_eq!(interval(&[round(item, &[None])], 0), None);
        assert_eq!(median([1.0, 2.0, 4.0, 9.0].into_iter()), Some(3.0));
    }
}
