//! Configuration: one builder and one environment variable with the same keys.
//!
//! A [`Builder`] collects options: by its methods, by [`Builder::parse`] from text such as
//! `limit:512MiB,device:/dev/nvme1n1`, by [`Builder::from_env`] from the variable `FARHEAP_CONF`. They are checked when
//! something is made of them. This module only describes: it starts nothing, and uses types of the layers below.
//! Parsing runs at start-up on the ordinary heap.
//!
//! Each option is explained at the [`Builder`]'s method of the same name; the
//! page `book/src/reference/options.md` has them all in a table.
//!
//! # Text form
//! `key:value` entries separated by commas; spaces around keys, values and entries are ignored. A
//! key ends at its first colon, so values may contain colons. A value that contains a comma, or
//! that begins with a double quote, is written in double quotes, in which `""` stands for one:
//! `device:"/mnt/a,b"`. Sizes take a unit: `KiB`, `MiB`, `GiB`, `TiB`, for which `K`, `M`, `G`, `T`
//! may stand (binary), or `kB`, `MB`, `GB`, `TB` (decimal); durations are as in `30s`, `500ms`, `1m30s`. A key may appear only once.
//!
//! # Invariants
//! 1. A `Config`, of which things are made, has passed every check.
//! 2. Parsing what a [`Builder`] prints gives an equal one, if its paths are UTF-8.

mod builder;
mod options;
mod text;
mod value;

#[doc(no_inline)]
pub use crate::paging::region::FaultMode;
#[doc(no_inline)]
pub use crate::store::Wipe;
pub use builder::Builder;
#[cfg(feature = "heap")]
pub(crate) use builder::Config;
#[doc(hidden)]
pub use options::documentation;
pub use value::Limit;
