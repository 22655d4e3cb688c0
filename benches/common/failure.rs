//! Why there is no figure.

use std::process::ExitCode;

/// Why a row has no figures.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The machine or the user's rights do not allow it.
    Skipped(String),
    /// It should have worked.
    Broken(String),
    /// The user wants to stop.
    Interrupted,
}

impl Failure {
    pub(crate) fn io(error: std::io::Error) -> Failure {
        Failure::Broken(error.to_string())
    }

    /// What an error of the library means here.
    pub(crate) fn of(error: farheap::Error) -> Failure {
        match error {
            farheap::Error::UffdUnavailable { .. } => Failure::Skipped(error.to_string()),
            error => Failure::Broken(error.to_string()),
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Failure::Skipped(why) | Failure::Broken(why) => f.write_str(why),
            Failure::Interrupted => f.write_str("interrupted"),
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// The end of the benchmark `name`. What the machine or the user's rights do not allow is said, and is no
/// failure.
pub(crate) fn end(name: &str, outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::Skipped(why)) => {
            println!("skipped: {why}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{name}: {failure}");
            ExitCode::FAILURE
        }
    }
}
