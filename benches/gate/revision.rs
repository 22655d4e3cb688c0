//! The two sides: this build, and a revision that is unpacked and built beside it.

use crate::rows::Kind;
use crate::{Failure, Result, process, sides};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A build of the benchmark.
pub(crate) struct Revision {
    pub(crate) name: String,
    program: PathBuf,
}

impl Revision {
    pub(crate) fn of_this_build() -> Result<Revision> {
        let program = std::env::current_exe().map_err(Failure::io)?;
        Ok(Revision { name: "itself".to_owned(), program })
    }

    /// Unpacks a revision under `target/gate` and builds its `gate`.
    ///
    /// # Errors
    /// [`Failure::Broken`] when git does not know it, or it has no `gate`, or does not build.
    pub(crate) fn build(revision: &str) -> Result<Revision> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let commit = format!("{revision}^{{commit}}");
        let mut git = Command::new("git");
        git.current_dir(root).args(["rev-parse", "--short=8", "--verify", &commit]);
        let name = output(&mut git)?.trim().to_owned();
        let folder = root.join("target/gate");
        let tree = folder.join(&name);
        if !tree.exists() {
            unpack(root, &name, &folder, &tree)?;
        }
        if !tree.join("benches/gate").exists() {
            let why = format!("{name} has no benchmark `gate`: later revisions can be compared");
            return Err(Failure::Broken(why));
        }
        println!("building {name} in {}", tree.display());
        let messages = output(
            Command::new(env!("CARGO"))
                .current_dir(&tree)
                .env("CARGO_TARGET_DIR", folder.join("build"))
                .args(["bench", "--bench", "gate", "--no-run", "--message-format", "json"])
                .arg("--quiet")
                .stderr(Stdio::inherit()),
        )?;
        let program = messages.lines().rev().find_map(executable);
        let program =
            program.ok_or_else(|| Failure::Broken("cargo names no program".to_owned()))?;
        Ok(Revision { name, program })
    }

    /// Runs a row once, in a process of its own; returns its figure.
    pub(crate) fn sample(&self, row: &Kind, place: &Path, test: bool) -> Result<f64> {
        process::check_interrupt()?;
        let mut child = Command::new(&self.program);
        child.args(["--child", row.name, "--place"]).arg(place);
        child.args(test.then_some("--test"));
        let text = sides::answer(&format!("{} of {}", row.name, self.name), child)?;
        text.parse().map_err(|_| Failure::Broken(format!("{} answers {text:?}", row.name)))
    }
}

/// Unpacks a commit; a tree that is there is whole.
fn unpack(root: &Path, commit: &str, folder: &Path, tree: &Path) -> Result<()> {
    let (archive, fresh) = (folder.join("fresh.tar"), folder.join("fresh"));
    drop(fs::remove_dir_all(&fresh));
    fs::create_dir_all(&fresh).map_err(Failure::io)?;
    let git = ["archive", "--format", "tar", "--output"];
    output(Command::new("git").current_dir(root).args(git).arg(&archive).arg(commit))?;
    output(Command::new("tar").arg("-xf").arg(&archive).arg("-C").arg(&fresh))?;
    fs::remove_file(&archive).map_err(Failure::io)?;
    fs::rename(&fresh, tree).map_err(Failure::io)
}

/// The path of the program in a message of cargo's, if this is the message that has it.
fn executable(message: &str) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(message).ok()?;
    Some(message.get("executable")?.as_str()?.into())
}

/// Runs a command to its end; returns what it printed.
fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| Failure::Broken(format!("{name}: {error}")))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Broken(format!("{name}: {} {}", output.status, why.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
