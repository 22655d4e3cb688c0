//! Which segments are to be local: a pure function of what is known of them.

use farheap::ByteCount;

/// Segments that move together: one, or those of a column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) bytes: ByteCount,
    /// How often each of its bytes was read lately, in samples.
    pub(super) heat: f64,
    /// Samples from which that is known.
    pub(super) samples: f64,
    pub(super) is_local: bool,
}

impl Candidate {
    /// Worth of a byte of it in local memory. A scan of far bytes costs about the same for
    /// each byte, so the reads that local memory saves are proportional to how often a byte is read.
    fn worth(&self) -> f64 {
        /// Factor by which another one must be read more often for a swap of the two: each moves once more, and
        /// what is nearly equal would change places with every plan.
        const KEEP: f64 = 1.25;
        /// Deviations of a count that are taken for chance.
        const CHANCE: f64 = 3.0;
        match self.is_local {
            false => self.heat,
            true => self.heat * (KEEP + CHANCE / self.samples.max(1.0).sqrt()),
        }
    }
}

/// Says for each candidate whether it is to be local, so that all of those fit into the budget.
///
/// Takes the hottest ones first, and passes over those that do not fit. What is local and fits stays;
/// what was never read does not come.
pub(super) fn plan(candidates: &[Candidate], budget: ByteCount) -> Vec<bool> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by(|a, b| candidates[*b].worth().total_cmp(&candidates[*a].worth()));
    let (mut left, mut is_local) = (budget.0, vec![false; candidates.len()]);
    for at in order {
        let candidate = &candidates[at];
        let wanted = candidate.is_local || candidate.heat > 0.0;
        if wanted && candidate.bytes.0 <= left {
            left -= candidate.bytes.0;
            is_local[at] = true;
        }
    }
    is_local
}

#[cfg(test)]
mod tests {
    use super::*;

    fn far(bytes: u64, heat: f64) -> Candidate {
        Candidate { bytes: ByteCount(bytes), heat, samples: heat, is_local: false }
    }

    fn local(bytes: u64, heat: f64) -> Candidate {
        Candidate { is_local: true, ..far(bytes, heat) }
    }

    fn chosen(candidates: &[Candidate], budget: u64) -> Vec<usize> {
        let is_local = plan(candidates, ByteCount(budget));
        (0..candidates.len()).filter(|at| is_local[*at]).collect()
    }

    #[test]
    fn the_hottest_bytes_come_first_and_what_does_not_fit_is_passed_over() {
        let all = [far(40, 5.0), far(70, 30.0), far(20, 20.0), far(10, 1.0)];
        assert_eq!(chosen(&all, 140), [0, 1, 2, 3]);
        assert_eq!(chosen(&all, 100), [1, 2, 3]);
        assert_eq!(chosen(&all, 60), [0, 2]);
        assert_eq!(chosen(&all, 9), [0_usize; 0]);
    }

    #[test]
    fn what_was_never_read_stays_where_it_is() {
        assert_eq!(chosen(&[far(1, 0.0), local(1, 0.0)], 10), [1]);
        // It gives way to what is read at all.
        assert_eq!(chosen(&[far(1, 1.0), local(1, 0.0)], 1), [0]);
    }

    #[test]
    fn chance_swaps_nothing_and_a_change_of_the_load_does() {
        // Ten reads more of two hundred are within the deviation of a count.
        assert_eq!(chosen(&[far(1, 210.0), local(1, 200.0)], 1), [1]);
        assert_eq!(chosen(&[far(1, 12.0), local(1, 6.0)], 1), [1]);
        assert_eq!(chosen(&[far(1, 400.0), local(1, 200.0)], 1), [0]);
        // A column of many segments is known better than one of them.
        let column = |heat, is_local| Candidate { samples: 1e4, is_local, ..far(1, heat) };
        assert_eq!(chosen(&[column(12.0, false), column(6.0, true)], 1), [0]);
    }

    #[test]
    fn a_smaller_budget_sends_the_coldest_away() {
        let all = [local(10, 3.0), local(10, 9.0), local(10, 6.0)];
        assert_eq!(chosen(&all, 30), [0, 1, 2]);
        assert_eq!(chosen(&all, 29), [1, 2]);
        assert_eq!(chosen(&all, 19), [1]);
    }

    #[test]
    fn the_budget_is_kept_whatever_there_is() {
        let mut random = 1_u64;
        let mut roll = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % below
        };
        for _ in 0..500 {
            let all: Vec<_> = (0..roll(40))
                .map(|_| Candidate { is_local: roll(2) == 0, ..far(roll(100), roll(9) as f64) })
                .collect();
            let budget = roll(1_500);
            let taken: u64 = chosen(&all, budget).iter().map(|at| all[*at].bytes.0).sum();
            assert!(taken <= budget, "{taken} of {budget}: {all:?}");
        }
    }
}
