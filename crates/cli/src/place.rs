//! Place: where a store is.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::exit::Exit;

/// `--data DIR` or `--store URL`.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Folder of the embedded store.
    #[arg(long, value_name = "DIR", default_value = "./steadfast-data", conflicts_with = "store")]
    data: PathBuf,
    /// The store itself, as sqlite:PATH.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
}

impl Place {
    /// The store's file.
    ///
    /// # Errors
    /// For a URL of another kind than `sqlite:`.
    pub fn path(&self) -> Result<PathBuf, Exit> {
        let Some(url) = &self.store else { return Ok(self.data.join("steadfast.db")) };
        match url.split_once(':') {
            Some(("sqlite", path)) => Ok(PathBuf::from(path.strip_prefix("//").unwrap_or(path))),
            Some((scheme, _)) if !Path::new(url).exists() && !scheme.contains('/') => Err(Exit::refused(
                "invalid_store",
                format!("--store has the scheme {scheme}, which this release cannot open; give sqlite:PATH"),
            )),
            _ => Ok(PathBuf::from(url)),
        }
    }

    /// The store's URL.
    ///
    /// # Errors
    /// As [`Place::path`].
    pub fn url(&self) -> Result<String, Exit> {
        Ok(format!("sqlite:{}", self.path()?.display()))
    }
}
