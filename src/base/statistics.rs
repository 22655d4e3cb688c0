//! [`statistics!`]: snapshots of what a part has done, in one shape.

use crate::base::units::ByteCount;
use std::fmt;

/// Declares a snapshot of statistics from a table: fields with their documentation, `since` for the
/// difference of two snapshots, `iter` over all values, and `Display`, a table for people.
///
/// A row is `name: kind "words"`, in a group with the label of its line. The kinds:
/// - `bytes` and `level` are of the moment, `most` is the maximum there ever was: in a difference they
///   are those of the later snapshot.
/// - `total` (bytes) and `count` only grow: a difference has what was added.
/// - `gauge` is a `level` that a part counts up and down.
///
/// A table that C has too is written in a macro, which passes it on: to this one, behind the name of the
/// snapshot in parentheses, and to the one that declares the structure for C (`ffi`).
macro_rules! statistics {
    (($(#[$doc:meta])* pub struct $Stats:ident;) $($table:tt)*) => {
        $crate::base::statistics::statistics! { $(#[$doc])* pub struct $Stats { $($table)* } }
    };
    (
        $(#[$doc:meta])*
        pub struct $Stats:ident {
            $($label:literal {
                $($(#[$row_doc:meta])* $name:ident: $kind:ident $words:literal;)*
            })*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[non_exhaustive]
        pub struct $Stats {
            $($($(#[$row_doc])* pub $name: $crate::base::statistics::statistics!(@type $kind),)*)*
        }

        impl $Stats {
            /// Returns what has happened since an earlier snapshot: counts are what was added since
            /// then, and what is of the moment is as in this snapshot.
            #[must_use]
            #[allow(unused_variables, reason = "all that a table has may be of the moment")]
            pub fn since(&self, earlier: &$Stats) -> $Stats {
                $Stats {
                    $($($name: $crate::base::statistics::statistics!(
                        @since $kind self.$name, earlier.$name
                    ),)*)*
                }
            }

            /// Returns the sums of this snapshot and another one's, of something beside it. A sum of
            /// maxima is what both had at once at most.
            #[must_use]
            pub fn plus(&self, other: &$Stats) -> $Stats {
                $Stats {
                    $($($name: $crate::base::statistics::statistics!(
                        @plus $kind self.$name, other.$name
                    ),)*)*
                }
            }

            /// Returns the names and values of all fields, sizes in bytes.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$($((stringify!($name), u64::from(self.$name)),)*)*].into_iter()
            }
        }

        /// Prints a table for people, one subject a line, without what is zero. Programs use the
        /// fields.
        impl std::fmt::Display for $Stats {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                use $crate::base::statistics::{LABEL, Shown, line};
                const { $(assert!($label.len() < LABEL, "a label touches what follows"));* };
                $(line(f, $label, &[$((Shown::from(self.$name), $words)),*])?;)*
                Ok(())
            }
        }
    };
    (@type bytes) => { $crate::base::units::ByteCount };
    (@type total) => { $crate::base::units::ByteCount };
    (@type $kind:ident) => { u64 };
    (@since total $later:expr, $earlier:expr) => {
        $crate::base::units::ByteCount($later.0.saturating_sub($earlier.0))
    };
    (@since count $later:expr, $earlier:expr) => { $later.saturating_sub($earlier) };
    (@since $kind:ident $later:expr, $earlier:expr) => { $later };
    (@plus bytes $one:expr, $other:expr) => { $crate::base::units::ByteCount($one.0 + $other.0) };
    (@plus total $one:expr, $other:expr) => { $crate::base::units::ByteCount($one.0 + $other.0) };
    (@plus $kind:ident $one:expr, $other:expr) => { $one + $other };
}

pub(crate) use statistics;

/// A value of a snapshot, as it prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Bytes(ByteCount),
    Count(u64),
}

impl From<ByteCount> for Shown {
    fn from(bytes: ByteCount) -> Shown {
        Shown::Bytes(bytes)
    }
}

impl From<u64> for Shown {
    fn from(count: u64) -> Shown {
        Shown::Count(count)
    }
}

/// Columns of a label, and of the space behind it.
pub(crate) const LABEL: usize = 14;

/// Writes a line of a table: its label, and what is not zero.
pub(crate) fn line(f: &mut fmt::Formatter<'_>, label: &str, row: &[(Shown, &str)]) -> fmt::Result {
    write!(f, "{label:<LABEL$}")?;
    let mut comma = "";
    for (value, words) in row {
        match value {
            Shown::Bytes(ByteCount::ZERO) | Shown::Count(0) => continue,
            Shown::Bytes(bytes) => write!(f, "{comma}{bytes} {words}")?,
            Shown::Count(count) => write!(f, "{comma}{count} {words}")?,
        }
        comma = ", ";
    }
    writeln!(f, "{}", if comma.is_empty() { "none" } else { "" })
}

#[cfg(test)]
#[allow(unreachable_pub, reason = "the table declares a public structure")]
mod tests {
    use super::*;

    statistics! {
        /// A table as any other.
        pub struct Example {
            "memory" {
                /// Bytes now.
                resident: bytes "resident";
                /// Bytes read.
                read: total "read";
            }
            "work" {
                /// Requests so far.
                requests: count "requests";
                /// Requests now.
                in_flight: gauge "in flight";
                /// Maximum number of requests at once.
                in_flight_max: most "at once";
            }
        }
    }

    const EARLIER: Example = Example {
        resident: ByteCount(4096),
        read: ByteCount(100),
        requests: 7,
        in_flight: 3,
        in_flight_max: 5,
    };
    const LATER: Example = Example {
        resident: ByteCount(1024),
        read: ByteCount(300),
        requests: 9,
        in_flight: 1,
        in_flight_max: 6,
    };

    #[test]
    fn a_difference_has_what_was_added_and_what_is_now() {
        let expected = Example { read: ByteCount(200), requests: 2, ..LATER };
        assert_eq!(LATER.since(&EARLIER), expected);
    }

    #[test]
    fn a_sum_has_what_both_have() {
        let expected = Example {
            resident: ByteCount(5120),
            read: ByteCount(400),
            requests: 16,
            in_flight: 4,
            in_flight_max: 11,
        };
        assert_eq!(EARLIER.plus(&LATER), expected);
    }

    #[test]
    fn values_come_with_their_names_in_the_order_of_the_table() {
        let names: Vec<_> = EARLIER.iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["resident", "read", "requests", "in_flight", "in_flight_max"]);
        assert_eq!(EARLIER.iter().map(|(_, value)| value).sum::<u64>(), 4096 + 100 + 7 + 3 + 5);
    }

    #[test]
    fn a_table_for_people_leaves_zeros_out() {
        let shown = Example { requests: 9, resident: ByteCount::mib(2), ..Example::default() };
        assert_eq!(shown.to_string(), "memory        2.0 MiB resident\nwork          9 requests\n");
        assert_eq!(Example::default().to_string(), "memory        none\nwork          none\n");
    }
}
