//! `steadfast migrate`.

use clap::Args;
use serde_json::json;
use steadfast::store::{StoreError, postgres, sqlite};

use crate::exit::Exit;
use crate::output::print;
use crate::place::{At, Place};

/// Brings a store's schema to this release; on PostgreSQL it makes the store where there is none. Opening a store does
/// the same: this verb is for whoever wants it done by another role, or before the nodes are replaced.
#[derive(Debug, Args)]
pub struct Migrate {
    #[command(flatten)]
    place: Place,
    /// Say that the store is a restored copy: whoever opens it next raises its epoch, which voids every claim in it.
    /// Needed after a file or a disk was copied back and after a dump was restored into the same cluster; a restore to
    /// another cluster and one to a point in time are noticed without it. Refused while a process has the store open.
    #[arg(long)]
    restored: bool,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Migrate {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let at = self.place.at()?;
        let (shown, restored) = (at.shown(), self.restored);
        let (had, has) = tokio::task::spawn_blocking(move || migrate(&at, restored))
            .await
            .map_err(|error| Exit::other(error.to_string()))??;
        if self.json {
            return print(&json!({ "store": shown, "had": had, "has": has, "restored": restored }).to_string());
        }
        let mut text = match had {
            0 => format!("{shown}: made, with schema version {has}\n"),
            _ if had == has => format!("{shown}: has schema version {has}, nothing to do\n"),
            _ => format!("{shown}: brought from schema version {had} to {has}\n"),
        };
        if restored {
            text += "marked as restored: whoever opens it next raises its epoch\n";
        }
        print(&text)
    }
}

/// The version it had, and the one it has.
fn migrate(at: &At, restored: bool) -> Result<(i64, i64), StoreError> {
    match at {
        At::File(path) => {
            let (had, has) = sqlite::migrate(path)?;
            if restored {
                sqlite::mark_restored(path)?;
            }
            let number = |version: usize| i64::try_from(version).expect("there are few migrations");
            Ok((number(had), number(has)))
        }
        At::Postgres(url) => {
            let (had, has) = postgres::migrate(url)?;
            if restored {
                postgres::mark_restored(url)?;
            }
            // A newer release may have been here, which lets this one in.
            Ok((i64::from(had), i64::from(has.max(had))))
        }
    }
}
