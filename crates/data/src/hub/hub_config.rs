//! Where the hub and its cache are.

use std::fmt;
use std::path::PathBuf;

use candle_core::{Result, bail};

/// Settings of the hub client; the environment variables are those of Python's `huggingface_hub`.
#[derive(Clone)]
pub struct HubConfig {
    /// Address of the hub, `HF_ENDPOINT`, by default `https://huggingface.co`.
    pub endpoint: String,
    /// Cache of repositories: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `XDG_CACHE_HOME/huggingface/hub`, else
    /// `~/.cache/huggingface/hub`.
    pub cache_dir: PathBuf,
    /// Access token: `HF_TOKEN`, else the file `HF_TOKEN_PATH`, else the file `token` in `HF_HOME` (or its default).
    pub token: Option<String>,
    /// Use the cache only: `HF_HUB_OFFLINE` is 1, ON, YES or TRUE.
    pub offline: bool,
}

impl HubConfig {
    /// Settings from the process environment.
    ///
    /// # Errors
    /// See [`HubConfig::from_vars`].
    pub fn from_env() -> Result<Self> {
        Self::from_vars(|name| std::env::var(name).ok())
    }

    /// Settings from variables that `var` looks up; empty ones count as unset.
    ///
    /// # Errors
    /// No cache folder follows from them: neither a home folder nor one of the cache variables is set.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let var = |name: &str| {
            var(name)
                .map(|v| v.trim().to_string())
                .filter(|v| !v.is_empty())
        };
        let home = var("HF_HOME").map(PathBuf::from).or_else(|| {
            let cache = var("XDG_CACHE_HOME").map(PathBuf::from);
            let user = var("HOME")
                .or_else(|| var("USERPROFILE"))
                .map(PathBuf::from);
            Some(
                cache
                    .or(user.map(|user| user.join(".cache")))?
                    .join("huggingface"),
            )
        });
        let cache = var("HF_HUB_CACHE").map(PathBuf::from);
        let Some(cache_dir) = cache.or(home.as_ref().map(|home| home.join("hub"))) else {
            bail!(
                "no folder for models from the hub: none of HF_HUB_CACHE, HF_HOME and HOME is set\nhint: set HF_HOME"
            );
        };
        let token_file = var("HF_TOKEN_PATH")
            .map(PathBuf::from)
            .or(home.map(|home| home.join("token")));
        let token = var("HF_TOKEN").or_else(|| {
            let token = std::fs::read_to_string(token_file?).ok()?;
            Some(token.trim().to_string()).filter(|token| !token.is_empty())
        });
        let endpoint = var("HF_ENDPOINT").unwrap_or("https://huggingface.co".to_string());
        let is_on =
            |value: String| matches!(value.to_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE");
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_string(),
            cache_dir,
            token,
            offline: var("HF_HUB_OFFLINE").is_some_and(is_on),
        })
    }
}

/// Without the token, which is a secret.
impl fmt::Debug for HubConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubConfig")
            .field("endpoint", &self.endpoint)
            .field("cache_dir", &self.cache_dir)
            .field("has_token", &self.token.is_some())
            .field("offline", &self.offline)
            .finish()
    }
}
